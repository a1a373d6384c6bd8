"""What every kind of sandbox has in common: a process tree with the tool server at its heart, started by the spawner.

A kind says only how its command line looks (`_command`) and what it cannot enforce. The invariants: a sandbox is on
record before it exists; `stop` may come at any moment, twice, or after a failed start, ends everything, is never cut
short by a cancel, and always ends within its bound.
"""

import asyncio
import dataclasses
import json
import logging
import os
import platform
import re
import signal
import socket
from abc import abstractmethod
from pathlib import Path
from typing import Any

from prorl_gym.errors import RuntimeStartError, SandboxError
from prorl_gym.runtimes.base import Runtime, RuntimeInfo, SandboxSpec
from prorl_gym.runtimes.channel import ToolChannel
from prorl_gym.runtimes.host import Host, SandboxRecord, UidLease, end_session
from prorl_gym.runtimes.launcher import SpawnedProcess
from prorl_gym.runtimes.loopback import ADDRESS_VARIABLE, LoopbackLease
from prorl_gym.tools.spec import ToolReply
from prorl_gym.toolserver.files import CHUNK_BYTES

logger = logging.getLogger(__name__)

SOCKET_DESCRIPTOR = 3
_CALL_GRACE_S = 10.0
_FILE_S = 60.0
_STOP_GRACE_S = 0.5
_EXIT_S = 2.0
_KILLED_EXIT_S = 5.0
_LOG_BYTES = 2000


class ProcessRuntime(Runtime):
    """A sandbox that is a process tree on this host."""

    folders: tuple[str, ...] = ("workspace",)
    """Made per sandbox, private to its user."""

    def __init__(self, spec: SandboxSpec, host: Host) -> None:
        self.spec = spec
        self._host = host
        self._lease: UidLease | None = None
        self._address: LoopbackLease | None = None
        self._making: asyncio.Task[SandboxRecord] | None = None
        self._record: SandboxRecord | None = None
        self._spawning: asyncio.Task[SpawnedProcess] | None = None
        self._process: SpawnedProcess | None = None
        self._channel: ToolChannel | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._stopped = False
        self._sealed = False
        self._memory_kills = 0

    @abstractmethod
    def _command(self, folder: Path, tool_server: list[str]) -> list[str]:
        """The whole command line; descriptor 3 must reach the tool server, whose own command line is given."""

    @abstractmethod
    def _unenforced(self) -> tuple[str, ...]:
        """Names of limits that this kind does not hold on this host."""

    async def _find_image(self) -> None:
        """Make sure of the image before anything is made for the sandbox.

        Raises:
            RuntimeStartError: There is none; says how to get it.
        """
        await asyncio.sleep(0)

    def _take_user(self) -> UidLease:
        """The host user that the sandbox runs as."""
        return UidLease.take()

    def _binds(self, folder: Path, uid: int | None) -> dict[str, str]:
        """Files of the host that the sandbox's outer processes find replaced. Blocks."""
        return {}

    def _settings(self) -> dict[str, Any]:
        """What the tool server is told beyond what every kind's is."""
        return {}

    def _outer_environment(self, folder: Path) -> dict[str, str]:
        """Of the program that makes the sandbox; nothing inside sees it."""
        return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}

    def _seals(self) -> bool:
        """Whether the network is there for the setup only."""
        return self.spec.network == "none" and self.spec.setup_network == "host" and not self._sealed

    def _shares_network(self) -> bool:
        """Whether the host's network is there now."""
        return self.spec.network == "host" or self._seals()

    def _holds_processes(self) -> bool:
        """Whether the limit on processes counts this sandbox alone: it goes by user (and namespace, since 5.14)."""
        return os.geteuid() == 0

    def _inside(self) -> bool:
        """Whether the tool environment is bound at its mount point."""
        return True

    def _workdir(self, folder: Path) -> str:
        """The working directory as the tool server sees it."""
        return self.spec.workdir

    def _environment(self, folder: Path) -> dict[str, str]:
        """The agent's environment: nothing of the host's, no pager, no editor, no prompts."""
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/home/agent", "USER": "agent", "LOGNAME": "agent", "SHELL": "/bin/bash",
            "TMPDIR": "/tmp",  # noqa: S108
            "LANG": "C.UTF-8", "TERM": "dumb", "COLUMNS": "200", "PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat",
            "SYSTEMD_PAGER": "", "EDITOR": "false", "VISUAL": "false", "GIT_EDITOR": "false",
            "GIT_TERMINAL_PROMPT": "0", "DEBIAN_FRONTEND": "noninteractive", "PIP_NO_INPUT": "1", "NO_COLOR": "1",
            "IPYTHONDIR": "/tmp/.ipython",  # noqa: S108
            **({ADDRESS_VARIABLE: self._address.address} if self._address is not None else {}),
            **self.spec.env,
        }  # fmt: skip

    async def start(self) -> None:
        """See the base class."""
        if self._stopped or self._process is not None:
            raise RuntimeStartError("a sandbox starts once")
        try:
            async with asyncio.timeout(self.spec.start_timeout_s):
                await self._find_image()
                await self._host.prepare()
                await self._launch()
        except TimeoutError:
            raise RuntimeStartError(
                f"the sandbox did not answer within {self.spec.start_timeout_s:g} s{self._log()}"
            ) from None
        except (OSError, SandboxError) as error:
            raise RuntimeStartError(f"the sandbox did not come up: {error}{self._log()}") from error

    async def _launch(self) -> None:
        lease = self._lease = self._take_user()
        self._address = self._host.addresses.lease() if self._shares_network() else None
        self._making = asyncio.create_task(asyncio.to_thread(self._make_folder, lease.uid))
        self._record = await asyncio.shield(self._making)
        folder = Path(self._record.folder)
        ours, theirs = socket.socketpair()
        try:
            self._spawning = asyncio.create_task(self._spawn(self._record, theirs, lease.uid))
            self._process = await asyncio.shield(self._spawning)
            process = (self._process.pid, self._process.start_time)
            self._record = dataclasses.replace(self._record, process=process)
            self._host.write(self._record)
            if self._record.memory_group is None and self.spec.limits.memory_bytes is not None:
                self._host.watchdog.watch(*process, self.spec.limits.memory_bytes)
            channel = self._channel = await ToolChannel.connect(ours)
            self._process.abandon = lambda: channel.close("the process that starts sandboxes has ended")
        except BaseException:
            ours.close()
            raise
        await self._greet(folder)

    async def _spawn(self, record: SandboxRecord, theirs: socket.socket, uid: int | None) -> SpawnedProcess:
        """A task of its own, so that a cancelled start does not lose sight of what it asked for."""
        folder = Path(record.folder)
        with theirs:
            tool_server = [*self._host.tools.command(inside=self._inside()), str(SOCKET_DESCRIPTOR)]
            binds = await asyncio.to_thread(self._binds, folder, uid)
            output = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                return await self._host.launcher.spawn(
                    self._command(folder, tool_server),
                    environment=self._outer_environment(folder),
                    folder=folder,
                    output=output,
                    descriptors=[theirs.fileno()],
                    uid=uid,
                    binds=binds,
                    cgroups=[Path(record.memory_group)] if record.memory_group is not None else [],
                )
            finally:
                os.close(output)

    async def _greet(self, folder: Path) -> None:
        settings = {
            "workdir": self._workdir(folder),
            "environment": self._environment(folder), "output_bytes": self.spec.limits.output_bytes,
            "processes": self.spec.limits.processes if self._holds_processes() else None,
            "file_bytes": self.spec.limits.file_bytes,
            **self._settings(),
        }  # fmt: skip
        body = json.dumps(settings).encode()
        reply, _ = await self._request({"op": "hello"}, body, within_s=self.spec.start_timeout_s)
        if "failed" in reply:
            raise SandboxError(f"the tool server cannot work in it: {reply['failed']}")

    def _make_folder(self, uid: int | None) -> SandboxRecord:
        self._record = self._host.new_folder(self.spec, uid, self.folders)
        return self._record

    def _log(self) -> str:
        """What the sandbox's own programs complained about, for error messages."""
        if self._record is None:
            return ""
        try:
            text = (Path(self._record.folder) / "log").read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace").strip()
        except OSError:
            return ""
        return f": {text}" if text else ""

    async def seal(self) -> None:
        """See the base class."""
        if self._record is None or not self._seals():
            return
        try:
            reply, _ = await self._request({"op": "seal"}, within_s=self.spec.start_timeout_s)
            if "failed" in reply:
                raise RuntimeStartError(f"the sandbox cannot leave its network: {reply['failed']}")
            self._sealed = True
            self._release_address()
            await self._greet(Path(self._record.folder))
        except SandboxError as error:
            raise RuntimeStartError(f"the sandbox cannot leave its network: {error}{self._log()}") from error

    def _release_address(self) -> None:
        if self._address is not None:
            self._address.release()
            self._address = None

    async def stop(self) -> None:
        """See the base class."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        cancelled = False
        while not self._stopping.done():
            try:
                await asyncio.wait([self._stopping])
            except asyncio.CancelledError:
                cancelled = True  # the clean-up is bounded; the cancel goes on after it
        if cancelled:
            raise asyncio.CancelledError
        self._stopping.result()

    async def _stop(self) -> None:
        self._stopped = True
        if self._channel is not None:
            self._channel.send({"op": "shutdown", "grace_s": _STOP_GRACE_S})
        if self._process is None and self._spawning is not None:  # the start was cancelled meanwhile
            await asyncio.wait([self._spawning])
            if not self._spawning.cancelled() and self._spawning.exception() is None:
                self._process = self._spawning.result()
        process = self._process
        if process is not None and not await _ended(process, _EXIT_S if self._channel is not None else 0.0):
            self._host.launcher.signal(process, signal.SIGKILL)
            await _ended(process, _KILLED_EXIT_S)
        if process is not None and process.status is None:  # the spawner is dead, which would have ended the rest
            await asyncio.to_thread(end_session, (process.pid, process.start_time))
        if self._channel is not None:
            self._channel.close("the sandbox was stopped")
        if process is not None:
            self._host.watchdog.forget(process.pid)
        why = None
        if self._making is not None:  # a cancelled start may have left the thread at work
            await asyncio.wait([self._making])
        if self._record is not None:
            why = await asyncio.to_thread(self._host.remove, self._record)
        if self._lease is not None:
            self._lease.release()
        self._release_address()
        if why is not None:
            raise SandboxError(f"the sandbox left something behind, which will be tried again: {why}")

    async def call(self, tool: str, arguments: dict[str, Any], *, timeout_s: float) -> ToolReply:
        """See the base class."""
        header, body = await self._request(
            {"op": "call", "tool": tool, "timeout_s": timeout_s},
            json.dumps(arguments).encode(),
            within_s=timeout_s + _CALL_GRACE_S,
        )
        if "failed" in header:
            raise SandboxError(f"the tool server broke: {header['failed']}")
        text = body.decode("utf-8", "replace")
        if header["error"] and self._out_of_memory():
            text += f"\n[a process was killed: over the sandbox's memory limit of {self._memory_mb()} MB]"
        return ToolReply(
            text,
            error=header["error"],
            timed_out=header["timed_out"],
            exit_code=header["exit_code"],
            duration_s=header["duration_s"],
            details=header["details"],
        )

    async def copy_in(self, source: Path | bytes, target: str) -> None:
        """See the base class."""
        offset = 0
        content, mode = await asyncio.to_thread(_content, source)
        while True:
            chunk = content[offset : offset + CHUNK_BYTES]
            header = {"op": "write", "path": target, "offset": offset, "mode": mode}
            reply, _ = await self._request(header, chunk, within_s=_FILE_S)
            if "failed" in reply:
                raise SandboxError(f"{target} cannot be written in the sandbox: {reply['failed']}")
            offset += len(chunk)
            if offset >= len(content):
                return

    async def copy_out(self, source: str, *, max_bytes: int) -> bytes:
        """See the base class."""
        parts: list[bytes] = []
        got = 0
        while True:
            header = {"op": "read", "path": source, "offset": got}
            reply, chunk = await self._request(header, within_s=_FILE_S)
            if reply.get("missing"):
                raise FileNotFoundError(source)
            if "failed" in reply:
                raise SandboxError(f"{source} cannot be read from the sandbox: {reply['failed']}")
            if max(reply["size"], got + len(chunk)) > max_bytes:
                raise SandboxError(f"{source} has {reply['size']} bytes, more than the {max_bytes} allowed")
            parts.append(chunk)
            got += len(chunk)
            if not chunk or got >= reply["size"]:
                return b"".join(parts)

    async def _request(
        self, header: dict[str, Any], body: bytes = b"", *, within_s: float
    ) -> tuple[dict[str, Any], bytes]:
        if self._channel is None or self._stopped:
            raise SandboxError("the sandbox is not running")
        try:
            return await self._channel.request(header, body, within_s=within_s)
        except SandboxError as error:
            process = self._process
            if process is not None and process.exited.is_set():
                why = ", out of memory" if self._out_of_memory() else ""
                raise SandboxError(f"{error} (it ended with status {process.status}{why}){self._log()}") from error
            raise

    def _memory_mb(self) -> int:
        return (self.spec.limits.memory_bytes or 0) >> 20

    def _out_of_memory(self) -> bool:
        """Whether something was killed for memory since the last look."""
        if self._process is None or self._record is None:
            return False
        groups, group = self._host.memory_groups, self._record.memory_group
        if groups is not None and group is not None:
            kills = groups.kills(Path(group))
        else:
            kills = self._host.watchdog.kills(self._process.pid)
        more, self._memory_kills = kills > self._memory_kills, kills
        return more

    def describe(self) -> RuntimeInfo:
        """See the base class."""
        return RuntimeInfo(
            kind=self.spec.kind,
            pid=self._process.pid if self._process is not None else None,
            image=self.spec.image,
            image_digest=None,
            unenforced=self._unenforced(),
            address=self._address.address if self._address is not None else None,
        )


async def _ended(process: SpawnedProcess, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await process.exited.wait()
    except TimeoutError:
        return False
    return True


def _content(source: Path | bytes) -> tuple[bytes, int | None]:
    if isinstance(source, bytes):
        return source, None
    return source.read_bytes(), source.stat().st_mode & 0o777


def counts_per_namespace() -> bool:
    """Whether this kernel counts a user's processes in each user namespace apart (since Linux 5.14)."""
    major, minor = re.findall(r"\d+", platform.release())[:2]
    return (int(major), int(minor)) >= (5, 14)
