"""The service's side of the spawner: start processes, hear of their ends, signal them.

The invariant: the spawner is the parent of every sandbox, so a process is signalled only while it is certainly ours.
"""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prorl_gym.errors import RuntimeStartError

_PACKET_BYTES = 1 << 18
_START_S = 20.0


@dataclass(slots=True)
class SpawnedProcess:
    """A process that the spawner started, as leader of a session and group of its own.

    Attributes:
        exited: Set once it has ended and was reaped.
        status: Exit code, negative for a signal; None before, or when the spawner itself died.
        abandon: Called when the spawner died, so that what does not die with it is ended in another way.
    """

    pid: int
    start_time: int | None
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    status: int | None = None
    abandon: Callable[[], None] | None = None


class Launcher:
    """One spawner process and the connection to it."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, asyncio.Future[SpawnedProcess]] = {}
        self._running: dict[int, SpawnedProcess] = {}
        self._number = 0

    @property
    def alive(self) -> bool:
        """Whether processes can be started."""
        return self._socket is not None

    async def start(self) -> None:
        """Start the spawner; harmless when it runs."""
        if self._socket is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        script = Path(__file__).with_name("spawner.py")
        command = [sys.executable, "-I", "-S", "-B", str(script), str(theirs.fileno())]
        try:
            self._process = await asyncio.to_thread(
                subprocess.Popen, command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env={}, cwd="/"
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive)

    async def stop(self) -> None:
        """Have the spawner kill what is left and end; bounded and idempotent."""
        self._disconnect()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, 10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        environment: dict[str, str],
        folder: Path,
        output: int,
        descriptors: Sequence[int] = (),
        uid: int | None = None,
        cgroups: Sequence[Path] = (),
        binds: Mapping[str, str] | None = None,
    ) -> SpawnedProcess:
        """Start a process.

        Args:
            argv: Program, as an absolute path, and arguments.
            environment: All of it.
            folder: Working directory.
            output: Descriptor for standard output and error.
            descriptors: Become 3, 4, ... of the process.
            uid: User, and group of the same number, to run as; None keeps the service's own.
            cgroups: Folders of the groups to run in.
            binds: Place → file that the process and its children find there, and nobody else; for a service that may
                mount.

        Raises:
            RuntimeStartError: It could not be started.
        """
        if self._socket is None:
            raise RuntimeStartError("the process that starts sandboxes is not running")
        self._number += 1
        message = {
            "id": self._number, "argv": list(argv), "env": environment, "cwd": str(folder), "uid": uid,
            "cgroups": [str(group) for group in cgroups], "binds": dict(binds or {}),
        }  # fmt: skip
        answer: asyncio.Future[SpawnedProcess] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        number = self._number
        try:
            async with asyncio.timeout(_START_S):
                await self._send(json.dumps(message).encode(), [output, *descriptors])
                return await asyncio.shield(answer)
        except TimeoutError:
            raise RuntimeStartError("the process that starts sandboxes does not answer") from None
        except OSError as error:
            raise RuntimeStartError(f"a sandbox process could not be asked for: {error}") from error
        except asyncio.CancelledError:
            answer.add_done_callback(self._kill_unwanted)
            raise
        finally:
            if answer.done():
                self._waiting.pop(number, None)

    def signal(self, process: SpawnedProcess, number: signal.Signals) -> None:
        """Signal a process and its group; nothing happens when it has ended."""
        if self._socket is not None and not process.exited.is_set():
            with contextlib.suppress(OSError):
                self._socket.send(json.dumps({"signal": int(number), "pid": process.pid}).encode())

    def _kill_unwanted(self, answer: "asyncio.Future[SpawnedProcess]") -> None:
        if not answer.cancelled() and answer.exception() is None:
            self.signal(answer.result(), signal.SIGKILL)

    async def _send(self, packet: bytes, descriptors: list[int]) -> None:
        while True:
            if self._socket is None:
                raise OSError("the process that starts sandboxes has ended")
            try:
                socket.send_fds(self._socket, [packet], descriptors)
                return
            except BlockingIOError:
                await asyncio.sleep(
                    0.005
                )  # the packet buffer is full: there is no event for room in it beside a reader

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                packet = self._socket.recv(_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._disconnect()
                return
            self._handle(json.loads(packet))

    def _handle(self, message: dict[str, Any]) -> None:
        if "exited" in message:
            process = self._running.pop(message["exited"], None)
            if process is not None:
                process.status = message["status"]
                process.exited.set()
            return
        answer = self._waiting.pop(message["id"], None)
        if "failed" in message:
            if answer is not None and not answer.done():
                answer.set_exception(RuntimeStartError(message["failed"]))
            return
        process = SpawnedProcess(message["pid"], message["start_time"])
        self._running[process.pid] = process
        if answer is not None and not answer.done():
            answer.set_result(process)
        else:
            self.signal(process, signal.SIGKILL)

    def _disconnect(self) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(RuntimeStartError("the process that starts sandboxes has ended"))
        self._waiting.clear()
        for process in self._running.values():
            process.exited.set()
            if process.abandon is not None:
                process.abandon()
        self._running.clear()
