"""The sandbox's whole contract. One contract test-suite runs over every kind."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from prorl_gym.tools.spec import ToolReply

RuntimeKind = Literal["local", "bubblewrap", "apptainer"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use; None is no limit. What a host cannot enforce is listed in `RuntimeInfo.unenforced`."""

    memory_bytes: int | None = 4 << 30
    processes: int | None = 512
    file_bytes: int | None = 2 << 30
    disk_bytes: int | None = 4 << 30
    output_bytes: int = 64_000
    """Of one tool reply's text, head and tail together."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a task asks of its sandbox.

    Attributes:
        kind: Which runtime.
        image: Directory or .sif; None is the host's own /usr, read-only (bubblewrap), or nothing at all (local).
        network: `none` leaves loopback only; `host` is the host's network on an address of its own.
        workdir: Where tools start; created when missing, private to the job, writable.
        env: Extra variables inside. The host's environment is never inherited.
        limits: Bounds on what is inside.
        disk: Where what the agent writes goes (bubblewrap): `host` is the file system of `paths.state`, `memory` one of
            its own in memory, which holds `limits.disk_bytes` to the byte and counts as memory where control groups do.
        start_timeout_s: From `start` to the first answer of the tool server.
        fakeroot: Whether the agent is root of the sandbox's user namespace, so that apt and pip install (apptainer).
        gpu: Whether the host's GPUs are seen inside (apptainer).
        setup_network: The network until `seal`; None is `network` from the start.
        job_id: For records and logs only.
    """

    kind: RuntimeKind
    image: str | None = None
    network: Literal["none", "host"] = "none"
    workdir: str = "/workspace"
    env: dict[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    disk: Literal["host", "memory"] = "host"
    start_timeout_s: float = 60.0
    fakeroot: bool = False
    gpu: bool = False
    setup_network: Literal["none", "host"] | None = None
    job_id: str = ""


@dataclass(frozen=True, slots=True)
class RuntimeInfo:
    """What a started sandbox is, for logs, provenance and `doctor`."""

    kind: RuntimeKind
    pid: int | None
    image: str | None
    image_digest: str | None
    unenforced: tuple[str, ...] = ()
    address: str | None = None
    """Its own on the host's loopback, while it shares the host's network; told inside by `PRORL_SANDBOX_ADDRESS`."""


class Runtime(ABC):
    """One sandbox instance.

    `async with runtime:` is the only way a job uses one: start inside the try, stop shielded. Everything the agent
    started dies with `stop`.
    """

    spec: SandboxSpec

    @abstractmethod
    async def start(self) -> None:
        """Bring the sandbox up and wait for its tool server.

        Cancelling leaves nothing behind once `stop` has been called.

        Raises:
            RuntimeStartError: It did not come up within `spec.start_timeout_s`, or this host cannot run it; says why.
        """

    async def seal(self) -> None:
        """End what the setup left running and its network; files stay. Nothing happens where the network stays too.

        Raises:
            RuntimeStartError: The network could not be left; the sandbox must not be used.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End every process inside, free what `start` took; bounded, shielded, idempotent, fine after a failed start.

        Raises:
            SandboxError: Something could not be freed; it has been recorded as a leftover and will be tried again.
        """

    @abstractmethod
    async def call(self, tool: str, arguments: dict[str, Any], *, timeout_s: float) -> ToolReply:
        """Run one tool call inside.

        Many may run at once. Cancelling interrupts the command inside and leaves the sandbox usable.

        Args:
            tool: `bash`, `ipython` or `file_editor`.
            arguments: Already checked against the tool's schema.
            timeout_s: For the tool itself; the output so far is kept. The call returns soon after in any case.

        Raises:
            SandboxError: The sandbox or its tool server is gone, or did not answer within the bound.
        """

    @abstractmethod
    async def copy_in(self, source: Path | bytes, target: str) -> None:
        """Write a host file, or bytes, to `target` inside; parents are created. Links inside are not followed out.

        A relative path starts in the working directory.

        Raises:
            SandboxError: It could not be written; says why.
        """

    @abstractmethod
    async def copy_out(self, source: str, *, max_bytes: int) -> bytes:
        """Read a regular file from inside; links that leave the sandbox's own root resolve inside it.

        A relative path starts in the working directory.

        Raises:
            FileNotFoundError: No such file.
            SandboxError: Not a regular file, over `max_bytes`, or the sandbox is gone.
        """

    @abstractmethod
    def describe(self) -> RuntimeInfo:
        """What this sandbox is."""

    async def __aenter__(self) -> Self:
        """Start; on any failure stop what was started."""
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop."""
        await self.stop()
