"""`demo`: everything at once, with a real small model in real sandboxes."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from prorl_gym.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from prorl_gym.commands.child import ChildProcess
    from prorl_gym.commands.rollout_file import RolloutFile

_HELP = """\
usage: python -m prorl_gym demo [KEY=VALUE ...]

Gets a small model, starts the in-box inference server and the service, rolls out 8 math problems twice each with
IPython in bubblewrap sandboxes, prints what happened, writes rollouts.jsonl here, checks it with `verify`, and ends
everything that it started.

Environment variables:
  DEMO_MODEL     smollm2 (the default), a local folder, or a hub id
  DEMO_BACKEND   address of a vLLM that already runs; then no inference server is started

Overrides configure the service, as for `serve`, e.g. runtime=local where user namespaces are not allowed.
"""

OUTPUT = Path("rollouts.jsonl")
REPEATS = 2
MAX_TURNS = 3
_PROBLEMS = Path(__file__).with_name("demo_problems.jsonl")
"""Each begins with worked examples: so small a model calls a tool only when it has seen how."""
_ENGINE_START_S = 300.0


def help_text() -> str:
    """How the command is used."""
    return _HELP


def demo_command(arguments: list[str]) -> int:
    """Run the demonstration; 0 when every rollout measured something and verifies."""
    from prorl_gym.commands.rollout_file import RolloutFile, read_assignments
    from prorl_gym.config.compose import compose

    overrides = ["experiment=demo", *arguments]
    config = compose(overrides).config
    if "math_agent" not in {environment.name for environment in config.environments}:
        raise ConfigError("environment: the demo rolls out math problems and needs 'environment=[math]'")
    from prorl_gym.commands.child import ChildProcess
    from prorl_gym.commands.console import make_console
    from prorl_gym.commands.own_service import OwnService, ScratchFolder
    from prorl_gym.commands.rollout_run import run_interruptibly

    console = make_console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        backend, model = os.environ.get("DEMO_BACKEND"), _model(console)
        folder = stack.enter_context(ScratchFolder()).path
        engine: ChildProcess | None = None
        if backend is None:
            engine = stack.enter_context(_engine(model, folder))
        if model is not None:
            overrides.append(f'policy.model="{model}"')
        service = stack.enter_context(OwnService(overrides, config, folder))
        console.print(f"starting (logs in {folder})", soft_wrap=True)
        with console.status("the service and the model are starting; the first time on this machine takes longer"):
            address = service.wait()
            console.print(f"service   {address}", soft_wrap=True)
            if engine is not None:
                backend = engine.wait_for_address(folder / "engine.address", _ENGINE_START_S)
        console.print(f"inference {backend}" + (f", {model.name}" if model else ""), soft_wrap=True)

        def check() -> None:
            for child in filter(None, (service.process, engine)):
                child.check()

        OUTPUT.unlink(missing_ok=True)
        file = stack.enter_context(RolloutFile(OUTPUT, read_assignments(_PROBLEMS, REPEATS)))
        run_interruptibly(_roll_out(file, console, address, str(backend), service.token, check))
    return _report(console, file)


def _model(console: "Console") -> Path | None:
    """The model's folder; None when a running backend says itself what it serves."""
    from prorl_gym.embedded.model_prep import DEFAULT_MODEL, prepare

    wanted = os.environ.get("DEMO_MODEL")
    if wanted is None and "DEMO_BACKEND" in os.environ:
        return None
    return prepare(wanted or DEFAULT_MODEL, console=console)


def _engine(model: Path | None, folder: Path) -> "ChildProcess":
    from prorl_gym.commands.child import WATCH_FD, ChildProcess

    options = {"--model": str(model), "--port": "0", "--address-file": str(folder / "engine.address")}
    arguments = [part for option in options.items() for part in option]
    return ChildProcess(
        "inference server",
        ["-m", "prorl_gym.embedded", *arguments, "--watch-fd", WATCH_FD],
        folder / "engine.log",
        grace_s=10.0,
    )


async def _roll_out(
    file: "RolloutFile",
    console: "Console",
    address: str,
    backend: str,
    token: str | None,
    check: "Callable[[], None]",
) -> None:
    from prorl_gym.client import RolloutClient
    from prorl_gym.commands.rollout_run import RolloutRun

    async with RolloutClient(address, token=token, compress=False) as client:
        server = await client.add_llm_server(backend)
        if not server.healthy:
            raise ConfigError(f"DEMO_BACKEND: {backend} does not serve: {server.detail}")
        limits = {"max_turns": MAX_TURNS}
        await RolloutRun(client, file, console, check_service=check, task="math_agent", sampling=limits).run()


def _report(console: "Console", file: "RolloutFile") -> int:
    from prorl_gym.commands.rollout_file import read_assignments
    from prorl_gym.commands.rollout_table import rollout_table, summary_table
    from prorl_gym.commands.verify import verify_command

    rows = {assignment.key: assignment.instance for assignment in read_assignments(_PROBLEMS, REPEATS)}
    results = sorted(file.results.items())
    console.print(rollout_table([(rows[key], facts) for key, facts in results]))
    console.print(summary_table(facts for _, facts in results))
    for key, facts in results:
        if facts.reward is None:
            console.print(f"row {key[0]}, repeat {key[1]}: {facts.failure or facts.ending}", soft_wrap=True)
    failed = len(rows) - sum(facts.reward is not None for _, facts in results)
    console.print(f"python -m prorl_gym verify {OUTPUT}")
    verified = verify_command([str(OUTPUT)])
    return 1 if failed or verified else 0
