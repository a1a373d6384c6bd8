"""One builder of one image at a time, over all processes and hosts that share the folder.

A lock is a folder with its owner's record inside, put in place by one rename, which is atomic on every file system, NFS
included, and carries its content with it. `flock` is not asked: many cluster file systems ignore it between hosts.

The invariant: a lock is only ever removed under a claim on its own token, so of many that find an owner dead one takes
over, and nobody removes a lock that has changed hands. No clocks of two hosts are compared: an owner of another host
counts as dead when its heartbeat has not moved for `stale_s` of the waiter's own time. The lock saves work; what makes
a finished image whole is the rename that publishes it.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from prorl_gym.runtimes.spawner import start_time_of

_log = logging.getLogger(__name__)
_OWNER = "owner.json"


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock.

    Attributes:
        host: Its name, for people.
        kernel: Boot id and pid namespace: where `pid` means anything.
        pid: Of the process.
        start_time: Of the process, in clock ticks since boot; None when unknown.
        token: Of this one acquisition.
    """

    host: str
    kernel: str
    pid: int
    start_time: int | None
    token: str

    @classmethod
    def here(cls) -> "Owner":
        """This process, with a new token."""
        pid = os.getpid()
        return cls(socket.gethostname(), _kernel(), pid, start_time_of(pid), secrets.token_hex(8))

    def is_gone(self) -> bool:
        """Whether it surely has ended; False when it cannot be seen from here."""
        return self.start_time is not None and self.kernel == _kernel() and start_time_of(self.pid) != self.start_time


class BuildLock:
    """`async with BuildLock(path):` waits for the lock and holds it. Cancelling while waiting leaves nothing behind."""

    def __init__(
        self,
        path: Path,
        *,
        heartbeat_s: float = 10.0,
        stale_s: float = 120.0,
        poll_s: float = 0.25,
        on_wait: Callable[[Owner], None] | None = None,
    ) -> None:
        """Nothing is touched yet.

        Args:
            path: Of the lock; its parent is created.
            heartbeat_s: Between two signs of life.
            stale_s: Without one, before the owner counts as dead; over a minute, for NFS caches attributes that long.
            poll_s: Between two looks at somebody else's lock.
            on_wait: Called once when somebody else holds it.
        """
        self._path = path
        self._heartbeat_s = heartbeat_s
        self._stale_s = stale_s
        self._poll_s = poll_s
        self._on_wait = on_wait
        self._me = Owner.here()
        self._seen: tuple[str, int] | None = None
        self._seen_since = 0.0
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Wait until it is ours."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        told = False
        while not self._acquire():
            owner = self._look()
            if owner is not None and self._is_dead(owner):
                _log.warning("taking over %s from pid %d on %s, which is gone", self._path, owner.pid, owner.host)
                self._remove(owner.token)
                if self._acquire():
                    break
            elif owner is not None and self._on_wait and not told:
                self._on_wait(owner)
                told = True
            await asyncio.sleep(self._poll_s)
        self._beating = asyncio.create_task(self._beat(), name=f"heartbeat of {self._path.name}")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release it, unless it has been taken over."""
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating
        self._remove(self._me.token)

    def _acquire(self) -> bool:
        prepared = self._path.with_name(f"{self._path.name}.{self._me.token}")
        prepared.mkdir()
        try:
            (prepared / _OWNER).write_text(json.dumps(asdict(self._me)))
            os.rename(prepared, self._path)
        except OSError as error:
            shutil.rmtree(prepared, ignore_errors=True)
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                return False
            raise
        return True

    def _look(self) -> Owner | None:
        """The owner, with `_seen` moved on; opening the file makes NFS ask the server anew."""
        try:
            with (self._path / _OWNER).open() as file:
                owner = _read(file.read())
                seen = (owner.token, os.fstat(file.fileno()).st_mtime_ns)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if seen != self._seen:
            self._seen, self._seen_since = seen, time.monotonic()
        return owner

    def _is_dead(self, owner: Owner) -> bool:
        return owner.is_gone() or time.monotonic() - self._seen_since > self._stale_s

    def _remove(self, token: str) -> None:
        claim = self._path.with_name(f"{self._path.name}.claim-{token}")
        try:
            claim.mkdir()
        except FileExistsError:
            self._drop_dead(claim)
            return
        try:
            owner = self._look()
            if owner is not None and owner.token == token:
                gone = self._path.with_name(f"{self._path.name}.gone-{token}")
                os.rename(self._path, gone)
                shutil.rmtree(gone, ignore_errors=True)
        finally:
            claim.rmdir()

    def _drop_dead(self, claim: Path) -> None:
        """A claim is held for moments; one that outlives the lock's patience is of somebody who died in them."""
        if self._seen_since and time.monotonic() - self._seen_since > 2 * self._stale_s:
            with contextlib.suppress(OSError):
                claim.rmdir()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            owner = self._look()
            if owner is None or owner.token != self._me.token:
                _log.warning("lost %s: this process was silent for too long; its image may be built twice", self._path)
                return
            with contextlib.suppress(OSError):
                os.utime(self._path / _OWNER)


def _read(text: str) -> Owner:
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):  # a host that crashed may leave the file empty
        return Owner("an unknown host", "", 0, None, "unreadable")


def _kernel() -> str:
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
