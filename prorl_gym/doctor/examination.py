"""All checks in order: of the host, of each kind of sandbox, of the policy.

The invariants: every check is bounded in time, and one that breaks is a finding like any other; leaving in any way
stops what was started. Sandboxes are made by the RuntimeFactory alone, as the service makes them.
"""

import asyncio
import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from prorl_gym.config.models import ProrlConfig, SandboxOverride
from prorl_gym.doctor import inside, isolation, model, network, speed
from prorl_gym.doctor.finding import Finding, failed, note, ok
from prorl_gym.doctor.host import HOST_CHECKS
from prorl_gym.doctor.limits import LIMIT_CHECKS
from prorl_gym.doctor.orphans import nothing_outlives_a_kill
from prorl_gym.doctor.subject import Neighbours, Subject, ask, own_pid_namespace
from prorl_gym.errors import ConfigError, ProrlGymError
from prorl_gym.handlers.sandbox_spec import sandbox_spec
from prorl_gym.runtimes.apptainer import empty_image
from prorl_gym.runtimes.base import RuntimeKind, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory
from prorl_gym.runtimes.images import RuntimeImageBuilder
from prorl_gym.server.service import runtime_kinds
from prorl_gym.types import LlmServer

_CHECK_S = 45.0
_PREPARE_S = 240.0
_MODEL_S = 180.0
_HOST_VARIABLE = "PRORL_GYM_DOCTOR"
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Programs colour their complaints."""
_SANDBOX_VARIABLE = "PRORL_DOCTOR_MARKER"

PAIR_CHECKS: dict[str, Callable[[Neighbours], Awaitable[Finding]]] = {
    "network none": network.network_is_off,
    "loopback inside": network.loopback_works,
    "other processes": isolation.processes_are_hidden,
    "other files": isolation.files_are_hidden,
    "host's environment": isolation.environment_is_clean,
    "host user": isolation.user_is_unprivileged,
    "tool latency": speed.tool_latency,
    "tool server": isolation.tool_server_is_out_of_reach,
}
SUBJECT_CHECKS: dict[str, Callable[[Subject], Awaitable[Finding]]] = {
    "addresses (network host)": network.addresses_are_unique,
    "start latency": speed.start_latency,
    "sandboxes per minute": speed.start_rate,
    "orphans after a kill": nothing_outlives_a_kill,
}


def configured_kinds(config: ProrlConfig) -> list[RuntimeKind]:
    """Those that the configuration uses, the default one first."""
    return [config.runtime.kind, *sorted(runtime_kinds(config) - {config.runtime.kind})]


class Examination:
    """One run of all checks.

    Args:
        config: What would be served.
        report: Told of each finding as it is made.
        progress: Told of what is looked at now.
    """

    def __init__(self, config: ProrlConfig, report: Callable[[Finding], None], progress: Callable[[str], None]) -> None:
        self._config = config
        self._report = report
        self._progress = progress
        self.findings: list[Finding] = []

    async def run(self) -> list[Finding]:
        """Make every check; what was found."""
        for name, check in HOST_CHECKS.items():
            await self._check("host", name, lambda check=check: check(self._config))  # type: ignore[misc]
        with _host_marker() as host_marker:
            factory = RuntimeFactory(
                self._config.runtime, self._config.paths, locate=RuntimeImageBuilder(self._config).locate
            )
            try:
                for kind in configured_kinds(self._config):
                    await self._examine_kind(kind, factory, host_marker)
            finally:
                await factory.stop()
        servers: list[LlmServer] = []

        async def backends() -> list[Finding]:
            findings, found = await model.backends(self._config)
            servers.extend(found)
            return findings

        await self._check("model", "backends", backends, _MODEL_S)
        await self._check("model", "renderer", lambda: model.renderer(self._config, servers), _MODEL_S)
        return self.findings

    async def _examine_kind(self, kind: RuntimeKind, factory: RuntimeFactory, host_marker: str) -> None:
        async def works() -> Finding:
            try:
                await factory.prepare([kind])
            except ConfigError as error:
                return _refusal(error)
            return ok("works", "a sandbox starts and its tool server answers")

        if not await self._check(kind, "works", works, _PREPARE_S):
            return
        with tempfile.TemporaryDirectory(prefix="prorl_gym-doctor-") as scratch:
            subject = Subject(_spec(self._config, kind, Path(scratch)), factory, self._config)
            separate = False

            async def beside(pair: Neighbours) -> None:
                nonlocal separate
                separate = pair.separate
                for name, check in PAIR_CHECKS.items():
                    await self._check(kind, name, lambda check=check: check(pair))  # type: ignore[misc]

            if not await self._with_neighbours(subject, host_marker, beside):
                return
            if separate:
                for name, check in LIMIT_CHECKS.items():
                    await self._check(kind, name, lambda check=check: check(subject))  # type: ignore[misc]
            else:
                words = "not tried, for the host's sake: its processes are not apart from the host's"
                self._add(note("limits", words, "choose runtime=bubblewrap or runtime=apptainer"), kind)
            for name, check in SUBJECT_CHECKS.items():
                await self._check(kind, name, lambda check=check: check(subject))  # type: ignore[misc]

    async def _with_neighbours(
        self, subject: Subject, host_marker: str, body: Callable[[Neighbours], Awaitable[None]]
    ) -> bool:
        """Whether two sandboxes could be there at once, and answered."""
        try:
            async with _neighbours(subject, host_marker) as pair:
                await body(pair)
        except (ProrlGymError, OSError) as error:
            fix = "look at its image (runtime.image, sandbox.image) and at runtime.start_timeout_s"
            self._add(failed("sandboxes", f"two at once: {error}", fix), subject.spec.kind)
            return False
        return True

    async def _check(
        self,
        area: str,
        name: str,
        check: Callable[[], Awaitable[Finding | list[Finding]]],
        within_s: float = _CHECK_S,
    ) -> bool:
        """Make one check; whether nothing failed."""
        self._progress(f"{area}: {name}")
        try:
            async with asyncio.timeout(within_s):
                findings = await check()
        except TimeoutError:
            fix = "try again while the host is idle; if it stays so, look at the sandboxes' host with dmesg"
            findings = failed(name, f"not done within {within_s:g} s", fix)
        except Exception as error:  # noqa: BLE001 - whatever breaks a check is what it found; the others go on
            fix = "try again while the host is idle; if it stays so, report it with this output"
            findings = failed(name, _words(error), fix)
        findings = findings if isinstance(findings, list) else [findings]
        for finding in findings:
            self._add(finding, area)
        return all(finding.status != "failed" for finding in findings)

    def _add(self, finding: Finding, area: str) -> None:
        finding = replace(finding, area=area, detail=_TERMINAL_CODES.sub("", finding.detail))
        self.findings.append(finding)
        self._report(finding)


@asynccontextmanager
async def _neighbours(subject: Subject, host_marker: str) -> AsyncIterator[Neighbours]:
    marker = f"doctor-{secrets.token_hex(16)}"
    first = subject.sandbox(env={_SANDBOX_VARIABLE: marker})
    async with first, subject.sandbox() as second:
        separate = await ask(second, inside.pid_namespace) != own_pid_namespace()
        yield Neighbours(subject, first, second, separate, marker, host_marker)


@contextlib.contextmanager
def _host_marker() -> Iterator[str]:
    """A variable in this process's environment, as a secret of the service's would be one."""
    os.environ[_HOST_VARIABLE] = marker = f"host-{secrets.token_hex(16)}"
    try:
        yield marker
    finally:
        del os.environ[_HOST_VARIABLE]


def _spec(config: ProrlConfig, kind: RuntimeKind, scratch: Path) -> SandboxSpec:
    """What a job of this kind would get, without a network; an empty image where one is needed and none named."""
    image = config.runtime.image or next(iter(_images_of_agents(config, kind)), None)
    if image is None and kind == "apptainer":
        scratch.chmod(0o755)
        image = str(empty_image(scratch))
    override = SandboxOverride(runtime=kind, image=image, network="none")
    spec = sandbox_spec(config, override, {}, job_id="doctor")
    return replace(spec, start_timeout_s=min(spec.start_timeout_s, _CHECK_S / 2))


def _images_of_agents(config: ProrlConfig, kind: RuntimeKind) -> Iterable[str]:
    for environment in config.environments:
        sandbox = environment.agent.sandbox
        if sandbox is not None and sandbox.image is not None and (sandbox.runtime or config.runtime.kind) == kind:
            yield sandbox.image


def _refusal(error: ConfigError) -> Finding:
    """A kind that does not work: the cause, as the sandbox told it where one started, and the advice that follows."""
    cause = str(error.__cause__ or ": ")
    before, found, after = str(error).partition(cause)
    fix = after.lstrip(". ") or "see README.md, Sandboxes; another kind is chosen by runtime=bubblewrap|apptainer|local"
    return failed("works", (before + found).removesuffix(": "), fix)


def _words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def exit_code(findings: Sequence[Finding]) -> int:
    """0 when nothing failed."""
    return int(any(finding.status == "failed" for finding in findings))


def as_json(findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """What `--json` prints."""
    rows = [
        {"area": f.area, "name": f.name, "status": f.status, "detail": f.detail, "fix": f.fix,
         "figures": dict(f.figures)}
        for f in findings
    ]  # fmt: skip
    return {"ok": exit_code(findings) == 0, "seconds": round(seconds, 1), "findings": rows}
