"""A sandbox of a kind that no configured environment announced: the kind is prepared when it is first started."""

from pathlib import Path
from typing import Any

from prorl_gym.errors import ConfigError, RuntimeStartError, SandboxError
from prorl_gym.runtimes.base import Runtime, RuntimeInfo, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory
from prorl_gym.tools.spec import ToolReply


class OnDemandRuntime(Runtime):
    """Prepares, then is what the factory makes."""

    def __init__(self, spec: SandboxSpec, factory: RuntimeFactory) -> None:
        self.spec = spec
        self._factory = factory
        self._made: Runtime | None = None

    async def start(self) -> None:
        """Prepare the kind, which the first time may take longer than `spec.start_timeout_s`, and start.

        Raises:
            RuntimeStartError: The kind does not work on this host, or this sandbox did not come up.
        """
        try:
            await self._factory.prepare([self.spec.kind])
        except ConfigError as error:
            raise RuntimeStartError(str(error)) from error
        self._made = self._factory.create(self.spec)
        await self._made.start()

    async def seal(self) -> None:
        """See `Runtime.seal`."""
        await self._started.seal()

    async def stop(self) -> None:
        """See `Runtime.stop`."""
        if self._made is not None:
            await self._made.stop()

    async def call(self, tool: str, arguments: dict[str, Any], *, timeout_s: float) -> ToolReply:
        """See `Runtime.call`."""
        return await self._started.call(tool, arguments, timeout_s=timeout_s)

    async def copy_in(self, source: Path | bytes, target: str) -> None:
        """See `Runtime.copy_in`."""
        await self._started.copy_in(source, target)

    async def copy_out(self, source: str, *, max_bytes: int) -> bytes:
        """See `Runtime.copy_out`."""
        return await self._started.copy_out(source, max_bytes=max_bytes)

    def describe(self) -> RuntimeInfo:
        """See `Runtime.describe`."""
        return self._started.describe()

    @property
    def _started(self) -> Runtime:
        if self._made is None:
            raise SandboxError("the sandbox has not been started")
        return self._made
