"""`rollout`: a data set through a service, one line of output per rollout."""

import os
import shlex
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prorl_gym.config.models import ProrlConfig
from prorl_gym.config.overrides import Override, apply_override, parse_override
from prorl_gym.config.suggest import did_you_mean, render_errors
from prorl_gym.errors import ConfigError, RequestError, ServiceError, ServiceUnreachable
from prorl_gym.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from prorl_gym.commands.own_service import ScratchFolder
    from prorl_gym.commands.rollout_file import RolloutFile
    from prorl_gym.commands.rollout_progress import Tally

_HELP = """\
usage: python -m prorl_gym rollout input=ROWS.jsonl output=OUT.jsonl [KEY=VALUE ...]

Rolls out every row of a data set, writes each result as a line when it ends, and prints a summary. An output file that
is there already is continued: what measured something is kept, the rest is made (again).

  input=FILE           JSON objects, one per line
  output=FILE          results, one per line, with the ledger that `verify` checks
  num_repeats=N        rollouts per row (1)
  task=NAME            for all rows; without it each row says its own (agent_ref.name, data_source)
  server=URL           a service that runs already; without it one is started, and ended, here
  token_env=NAME       environment variable that holds that service's bearer token
  sampling.KEY=VALUE   of the requests, e.g. sampling.max_tokens=512 sampling.temperature=0.7
  timeout_s=S          budget per rollout
  concurrency=N        rollouts handed in at once (256); the service's pools decide how many run
  limit=N              only the first N rows

Everything else configures the service that is started here, as for `serve`:

  python -m prorl_gym rollout input=rows.jsonl output=out.jsonl num_repeats=4 task=math \\
    'backend.addresses=["http://127.0.0.1:8000/v1"]'

Exit codes: 0 every rollout measured something, 1 some did not, 2 wrong configuration, 130 interrupted.
"""


class RolloutSettings(BaseModel):
    """The command's own keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: Path
    output: Path
    num_repeats: int = Field(1, ge=1)
    task: str | None = None
    server: str | None = None
    token_env: str | None = None
    sampling: SamplingParams = SamplingParams()
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    concurrency: int = Field(256, ge=1)
    limit: int | None = Field(None, ge=1)


_SERVICE_KEYS = {*ProrlConfig.model_fields, "gym", "environment", "experiment"}


def help_text() -> str:
    """How the command is used."""
    return _HELP


def rollout_command(arguments: list[str]) -> int:
    """Roll out a data set."""
    settings, overrides = split_arguments(arguments)
    from prorl_gym.commands.console import make_console
    from prorl_gym.commands.rollout_file import RolloutFile, read_assignments
    from prorl_gym.commands.rollout_run import run_interruptibly

    console = make_console()
    assignments = read_assignments(settings.input, settings.num_repeats, settings.limit)
    file = RolloutFile(settings.output, assignments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            stack.enter_context(file)
            if already := len(file.results):
                console.print(f"continuing {settings.output}: {already} of {len(assignments)} are there")
            if not file.open_assignments:
                return _report(console, file, None)
            service = _service(stack, settings, overrides, console)
            tally = run_interruptibly(_roll_out(settings, file, console, service))
            if service.scratch is not None:
                service.scratch.keep = tally.failures > 0  # its log says where a handler broke
    except KeyboardInterrupt:
        done = f"{len(file.results)} of {len(assignments)} rollouts are in {settings.output}"
        console.print(f"interrupted: {done}; the same command continues", soft_wrap=True)
        return 130
    return _report(console, file, tally, service.scratch.path if service.scratch else None)


def split_arguments(arguments: Sequence[str]) -> tuple[RolloutSettings, list[str]]:
    """The command's own settings, and the overrides that are the service's.

    Raises:
        ConfigError: Names the key.
    """
    own: dict[str, Any] = {}
    overrides: list[str] = []
    for line in arguments:
        override = parse_override(line)
        if _is_own(override):
            apply_override(own, override)
        elif "." not in override.key and override.key not in _SERVICE_KEYS:
            raise ConfigError(f"{override.key}: unknown key{did_you_mean(override.key, RolloutSettings.model_fields)}")
        else:
            overrides.append(line)
    try:
        settings = RolloutSettings.model_validate(own)
    except ValidationError as e:
        raise ConfigError(f"{render_errors(e, RolloutSettings)}\nSee `python -m prorl_gym rollout --help`.") from None
    if settings.server and overrides:
        raise ConfigError(
            f"{' '.join(map(shlex.quote, overrides))}: would configure a service of the command's own, and with "
            f"server= there is none; for requests write sampling.KEY=VALUE"
        )
    return settings, overrides


def _is_own(override: Override) -> bool:
    if override.key == "server":
        return "://" in str(override.value)  # else it chooses an option of the group `server`
    return override.key in RolloutSettings.model_fields or override.key.startswith("sampling.")


@dataclass(frozen=True, slots=True)
class _Service:
    """The service that is asked.

    Attributes:
        address: Where it listens.
        token: Its bearer token, if it wants one.
        check: Raises when it is known to be gone.
        scratch: Folder with the log of a service of our own.
    """

    address: str
    token: str | None
    check: "Callable[[], None]"
    scratch: "ScratchFolder | None" = None


def _service(stack: ExitStack, settings: RolloutSettings, overrides: list[str], console: "Console") -> _Service:
    """The one named, else one of our own, which is ended with the stack."""
    if settings.server:
        token = None
        if settings.token_env and not (token := os.environ.get(settings.token_env)):
            raise ConfigError(f"token_env: the environment variable {settings.token_env} is not set")
        return _Service(settings.server, token, lambda: None)
    from prorl_gym.commands.own_service import OwnService, ScratchFolder
    from prorl_gym.config.compose import compose

    config = compose(overrides).config
    scratch = stack.enter_context(ScratchFolder())
    service = stack.enter_context(OwnService(overrides, config, scratch.path))
    with console.status("starting the service"):
        address = service.wait()
    console.print(f"service on {address}, log in {service.process.log}", soft_wrap=True)
    if not config.backend.addresses:
        console.print(f"no backend.addresses: the rollouts wait for POST {address}/add_llm_server", soft_wrap=True)
    return _Service(address, service.token, service.process.check, scratch)


async def _roll_out(settings: RolloutSettings, file: "RolloutFile", console: "Console", service: _Service) -> "Tally":
    from prorl_gym.client import RolloutClient
    from prorl_gym.commands.rollout_run import RolloutRun

    sampling = settings.sampling.model_dump(mode="json", exclude_none=True)
    async with RolloutClient(service.address, token=service.token, compress=False) as client:
        try:
            await client.health()
        except ServiceUnreachable:
            raise
        except (RequestError, ServiceError) as e:
            raise ConfigError(f"server: {service.address} does not answer like a prorl_gym service: {e}") from None
        run = RolloutRun(
            client, file, console, check_service=service.check, task=settings.task, sampling=sampling,
            timeout_s=settings.timeout_s, concurrency=settings.concurrency,
        )  # fmt: skip
        return await run.run()


def _report(console: "Console", file: "RolloutFile", tally: "Tally | None", scratch: Path | None = None) -> int:
    from prorl_gym.commands.rollout_table import summary_table

    if file.results:
        console.print(summary_table(file.results.values()))
    refused = tally.refused if tally else {}
    for reason, times in sorted(refused.items(), key=lambda item: -item[1]):
        console.print(f"refused {_times(times)}: {reason}", soft_wrap=True)
    broken: dict[str, int] = {}
    for facts in file.results.values():
        if facts.reward is None:
            broken[facts.failure or facts.ending] = broken.get(facts.failure or facts.ending, 0) + 1
    for reason, times in sorted(broken.items(), key=lambda item: -item[1]):
        console.print(f"failed {_times(times)}: {reason}", soft_wrap=True)
    console.print(f"{len(file.results)} results in {file.path}", soft_wrap=True)
    if refused or broken:
        if scratch is not None:
            console.print(f"the service's log stays in {scratch}", soft_wrap=True)
        console.print("the same command makes these again", soft_wrap=True)
    return 1 if refused or broken else 0


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
