"""Makes sandboxes of every kind, proves once that this host can run them, and clears what is left behind."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prorl_gym.config.models import PathsConfig, RuntimeConfig
from prorl_gym.errors import ConfigError, RuntimeStartError
from prorl_gym.runtimes import apptainer
from prorl_gym.runtimes.apptainer import ApptainerRuntime, ApptainerSetup, ImageLocator
from prorl_gym.runtimes.base import Runtime, RuntimeKind, SandboxSpec
from prorl_gym.runtimes.bubblewrap import BubblewrapRuntime, bubblewrap_program, synthetic_etc
from prorl_gym.runtimes.host import Host
from prorl_gym.runtimes.local import LocalRuntime

logger = logging.getLogger(__name__)

_RETRY_S = 15.0
_PROBE_S = 30.0


class RuntimeFactory:
    """One per service.

    Args:
        runtime: The sandbox that tasks get by default; what it asks for beyond the kind is proven too.
        paths: Where folders go.
        locate: Finds images by the names that rows and definitions have; without it only paths are understood.
    """

    def __init__(self, runtime: RuntimeConfig, paths: PathsConfig, *, locate: ImageLocator | None = None) -> None:
        self._config = runtime
        self._locate = locate
        self._host = Host(paths.state)
        self._prepared: set[RuntimeKind] = set()
        self._preparing = asyncio.Lock()
        self._bubblewrap: tuple[str, Path] = ("", Path())
        self._apptainer = ApptainerSetup("")
        self._retries: asyncio.Task[None] | None = None

    async def prepare(self, kinds: Iterable[RuntimeKind]) -> None:
        """Build the tool environment, sweep leftovers and prove that each kind works here; harmless when done.

        Raises:
            ConfigError: A kind cannot run on this host; names the cause and what to do.
        """
        async with self._preparing:
            for kind in kinds:
                if kind not in self._prepared:
                    await self._prepare_kind(kind)
                    self._prepared.add(kind)
            if self._retries is None and self._prepared:
                await self.sweep()
                self._retries = asyncio.create_task(self._retry_leftovers())

    async def _prepare_kind(self, kind: RuntimeKind) -> None:
        if kind == "local":
            logger.warning("runtime.kind=local isolates nothing: agents act on this host")
        await self._host.prepare()
        if kind == "bubblewrap":
            program = await asyncio.to_thread(bubblewrap_program, self._host.area)
            self._bubblewrap = (program, await asyncio.to_thread(synthetic_etc, self._host.area))
        if kind == "apptainer":
            await self._prepare_apptainer()
            return
        try:
            await self._probe(SandboxSpec(kind=kind, start_timeout_s=_PROBE_S, job_id="probe"))
        except RuntimeStartError as error:
            raise ConfigError(
                f"runtime.kind={kind} does not work on this host: {error}{_advice(str(error))}"
            ) from error

    async def _probe(self, spec: SandboxSpec) -> None:
        async with self._make(spec):
            pass

    async def _prepare_apptainer(self) -> None:
        """Try the ways of running it, the most confining first."""
        program = apptainer.apptainer_program()
        image, asked = self._config.image, self._config.kind == "apptainer"
        if not asked or image is None:
            image = str(await asyncio.to_thread(apptainer.empty_image, self._host.area))
        spec = SandboxSpec(
            kind="apptainer", image=image, fakeroot=asked and self._config.fakeroot,
            gpu=asked and self._config.gpu, start_timeout_s=_PROBE_S, job_id="probe",
        )  # fmt: skip
        problems: list[RuntimeStartError] = []
        for setup in apptainer.setups(program):
            self._apptainer = setup
            try:
                await self._probe(spec)
            except RuntimeStartError as error:
                problems.append(error)
                continue
            if problems:
                logger.warning("apptainer runs here, but not all limits hold (%s): %s", setup, problems[0])
            if not await asyncio.to_thread(apptainer.maps_many_users, setup):
                logger.warning("in fakeroot sandboxes files belong to root alone: %s", apptainer.FAKEROOT_ADVICE)
            return
        message = str(problems[-1])
        raise ConfigError(
            f"runtime.kind=apptainer does not work on this host: {message}{apptainer.advice(message)}"
        ) from problems[-1]

    def create(self, spec: SandboxSpec) -> Runtime:
        """A sandbox that has not been started.

        Raises:
            RuntimeStartError: `prepare` has not proven its kind.
        """
        if spec.kind not in self._prepared:
            raise RuntimeStartError(f"runtime kind {spec.kind} has not been prepared on this host")
        return self._make(spec)

    def _make(self, spec: SandboxSpec) -> Runtime:
        if spec.kind == "bubblewrap":
            program, etc = self._bubblewrap
            return BubblewrapRuntime(spec, self._host, program, etc)
        if spec.kind == "apptainer":
            return ApptainerRuntime(spec, self._host, self._apptainer, self._locate)
        return LocalRuntime(spec, self._host)

    async def sweep(self) -> int:
        """Clear what dead services, and failed deletions of this one, left; returns how many sandboxes were cleared."""
        return await asyncio.to_thread(self._host.sweep)

    def leftovers(self) -> list[dict[str, Any]]:
        """What could not be cleared so far; tried again every few seconds."""
        return list(self._host.leftovers.values())

    async def stop(self) -> None:
        """End what still runs; sandboxes should have been stopped before. Idempotent."""
        if self._retries is not None:
            self._retries.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._retries
            self._retries = None
        await self._host.watchdog.stop()
        await self._host.launcher.stop()
        if self._prepared:
            await asyncio.to_thread(self._host.sweep, own=True)

    async def _retry_leftovers(self) -> None:
        while True:
            await asyncio.sleep(_RETRY_S)
            if self._host.leftovers:
                await self.sweep()


def _advice(message: str) -> str:
    """What to do about the ways in which hosts refuse namespaces."""
    text = message.lower()
    if "loopback" in text or "rtm_newaddr" in text:
        return (
            ". The host lets no network namespace be set up: run outside a restricted container, or choose "
            "runtime=local (no isolation)"
        )
    if any(word in text for word in ("namespace", "uid map", "operation not permitted", "no permissions")):
        return (
            ". The host refuses unprivileged user namespaces: set sysctl kernel.unprivileged_userns_clone=1, "
            "user.max_user_namespaces=15000 and, on Ubuntu 24.04 and later, "
            "kernel.apparmor_restrict_unprivileged_userns=0, or choose runtime=local (no isolation)"
        )
    return ""
