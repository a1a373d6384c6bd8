"""What all sandboxes of one service share on this host: folders, the spawner, user ids, records.

The invariant: whatever exists outside this process for a sandbox (processes, folders) is on record beside its
folder before it is used, with the pid and start time of its owner, so that the next service can sweep it.
"""

import asyncio
import contextlib
import errno
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prorl_gym.errors import ConfigError, RuntimeStartError
from prorl_gym.runtimes.base import SandboxSpec
from prorl_gym.runtimes.launcher import Launcher
from prorl_gym.runtimes.loopback import LoopbackAddresses
from prorl_gym.runtimes.memory import MemoryGroups, MemoryWatchdog, remove_group
from prorl_gym.runtimes.spawner import start_time_of
from prorl_gym.runtimes.toolenv import ToolEnvironment, tool_environment

_UIDS = 1 << 16
_SWEEP_KILL_S = 2.0
_UID_RANGES = (2_000_000_000, 1_000_000, 20_000)
"""First ids of ranges that no distribution hands out to people; the first one that this host maps is used."""


@dataclass(frozen=True, slots=True)
class SandboxRecord:
    """One sandbox on this host. Pids come with their start times: together they are never another process."""

    sandbox_id: str
    folder: str
    kind: str
    job_id: str
    owner: tuple[int, int | None]
    process: tuple[int, int | None] | None = None
    memory_group: str | None = None


def runs(process: tuple[int, int | None] | None) -> bool:
    """Whether a recorded process still exists; one that has ended and waits to be reaped does not."""
    if process is None or process[1] is None or start_time_of(process[0]) != process[1]:
        return False
    try:
        return Path(f"/proc/{process[0]}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def public_folder(folder: Path) -> None:
    """Make a folder that every user may enter, whatever the service's umask is. Blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)


class UidLease:
    """An unprivileged user id that no other live sandbox of this host has.

    Held by an abstract socket name, which the kernel frees when the service dies.
    """

    def __init__(self, uid: int | None, lock: socket.socket | None = None) -> None:
        self.uid = uid
        self._lock = lock

    @classmethod
    def take(cls) -> "UidLease":
        """Lease one; for a service that is not root the lease is empty, its sandboxes run under its own user."""
        if os.geteuid() != 0:
            return cls(None)
        first = _first_uid()
        for _ in range(1000):
            uid = first + secrets.randbelow(_UIDS)
            lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                lock.bind(f"\0prorl_gym-uid-{uid}")
            except OSError as error:
                lock.close()
                if error.errno != errno.EADDRINUSE:
                    raise RuntimeStartError(f"no user id could be leased for a sandbox: {error}") from error
                continue
            return cls(uid, lock)
        raise RuntimeStartError("no user id is free for another sandbox")

    def release(self) -> None:
        """Give it back; harmless twice."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _first_uid() -> int:
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        start, _, count = map(int, line.split())
        for first in _UID_RANGES:
            if start <= first and first + _UIDS <= start + count:
                return first
    raise ConfigError(
        "the service runs as root, but this container maps too few user ids (/proc/self/uid_map) to give sandboxes an "
        "unprivileged one: run the service as an ordinary user"
    )


class Host:
    """Shared state; one per service."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.launcher = Launcher()
        self.watchdog = MemoryWatchdog()
        self.addresses = LoopbackAddresses()
        self.memory_groups: MemoryGroups | None = None
        """None until prepared, and where this host lets us make none; then the watchdog does what it can."""
        self.leftovers: dict[str, dict[str, Any]] = {}
        self._owner = (os.getpid(), start_time_of(os.getpid()))
        self.area = state
        """Folder of what sandboxes see, known once prepared; every user may pass through it."""
        self._tools: ToolEnvironment | None = None
        self._ready = asyncio.Lock()

    async def prepare(self) -> None:
        """Make folders and the tool environment, and start the spawner; harmless when done, restarts a dead spawner.

        Raises:
            ConfigError: Something is missing on this host; says what to do.
        """
        async with self._ready:
            if self._tools is None:
                self.area = await asyncio.to_thread(self._make_area)
                self.memory_groups = await asyncio.to_thread(MemoryGroups.find)
                self._tools = await asyncio.to_thread(tool_environment, self.area)
            if not self.launcher.alive:
                await self.launcher.stop()
                await self.launcher.start()

    @property
    def tools(self) -> ToolEnvironment:
        """The tool environment.

        Raises:
            RuntimeStartError: `prepare` has not made it.
        """
        if self._tools is None:
            raise RuntimeStartError("the tool environment has not been made")
        return self._tools

    def _make_area(self) -> Path:
        try:
            self.state.mkdir(parents=True, exist_ok=True)
            area = self.state.resolve()
            if os.geteuid() == 0 and not _passable(area):
                area = Path(f"/var/tmp/prorl_gym-{os.geteuid()}")  # noqa: S108 - ownership is checked below
                with contextlib.suppress(FileExistsError):
                    area.mkdir(mode=0o700)
                    area.chmod(0o755)
                status = area.lstat()
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                    raise ConfigError(
                        f"paths.state={self.state}: sandboxes run as other users, who may not pass through "
                        f"it, and {area} belongs to somebody else: choose another paths.state"
                    )
            for name in ("sandboxes", "toolenv", "bubblewrap", "etc"):
                public_folder(area / name)
            (area / "records").mkdir(mode=0o700, exist_ok=True)
            if os.statvfs(area).f_flag & os.ST_NOEXEC:
                raise ConfigError(
                    f"paths.state={self.state}: no program can run on {area}, which is mounted noexec: choose another"
                )
            return area
        except OSError as error:
            raise ConfigError(f"paths.state={self.state} cannot be written: {error}") from error

    @property
    def records(self) -> Path:
        """Folder of the records of live sandboxes: beside their folders, which another service may have to clear."""
        return self.area / "records"

    def new_folder(self, spec: SandboxSpec, uid: int | None, names: tuple[str, ...]) -> SandboxRecord:
        """Record a sandbox, make its folders, private to `uid`, and its memory group. Blocks.

        Raises:
            OSError: They cannot be made.
        """
        sandbox_id = secrets.token_hex(8)
        folder = self.area / "sandboxes" / sandbox_id
        record = SandboxRecord(sandbox_id, str(folder), spec.kind, spec.job_id, self._owner)
        limit_bytes = spec.limits.memory_bytes
        if self.memory_groups is not None and limit_bytes is not None:
            with contextlib.suppress(OSError):
                group = self.memory_groups.make(f"prorl_gym-{sandbox_id}", limit_bytes)
                record = replace(record, memory_group=str(group))
        self.write(record)
        public_folder(folder)
        for name in names:
            (folder / name).mkdir(mode=0o700)
            if uid is not None:
                os.chown(folder / name, uid, uid)
        return record

    def write(self, record: SandboxRecord) -> None:
        """Put a record on disk, atomically. Blocks."""
        target = self.records / f"{record.sandbox_id}.json"
        partial = target.with_suffix(".part")
        partial.write_text(json.dumps(asdict(record)))
        partial.rename(target)

    def remove(self, record: SandboxRecord) -> str | None:
        """Delete a sandbox's folder and record; returns why not, and keeps it as a leftover. Blocks."""
        if record.memory_group is not None:
            remove_group(Path(record.memory_group))
        why = _delete(Path(record.folder))
        if why is None and runs(record.process):
            why = "its processes did not end"
        if why is not None:
            self.leftovers[record.sandbox_id] = {
                "sandbox_id": record.sandbox_id, "job_id": record.job_id, "folder": record.folder, "reason": why,
            }  # fmt: skip
            return why
        self.leftovers.pop(record.sandbox_id, None)
        (self.records / f"{record.sandbox_id}.json").unlink(missing_ok=True)
        return None

    def sweep(self, *, own: bool = False) -> int:
        """Clear what dead services, and this one's failed deletions, left; returns how many were cleared. Blocks."""
        cleared = 0
        for path in sorted(self.records.glob("*.json")):
            try:
                fields = json.loads(path.read_text())
                owner, process = tuple(fields.pop("owner")), fields.pop("process")
                record = SandboxRecord(**fields, owner=owner, process=tuple(process) if process else None)
            except (OSError, ValueError, TypeError):
                continue  # another service is writing or removing it
            mine = record.owner == self._owner
            if (mine and not own and record.sandbox_id not in self.leftovers) or (not mine and runs(record.owner)):
                continue
            if record.process is not None:
                if runs(record.process):
                    _kill(record.process)
                end_session(record.process)
            cleared += self.remove(record) is None
        return cleared


def _kill(process: tuple[int, int | None]) -> None:
    """End a recorded process and its group, and wait a little until it has gone."""
    deadline = time.monotonic() + _SWEEP_KILL_S
    while runs(process) and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            os.killpg(process[0], signal.SIGKILL)
        time.sleep(0.01)  # not our child: nothing tells of its end


def end_session(leader: tuple[int, int | None]) -> None:
    """Kill what a dead leader's session still holds in user namespaces of its own, and wait a little. Blocks.

    Apptainer's file systems (squashfuse, fuse-overlayfs) are left so by a spawner that was killed. A session's number
    is no other process's id while a member lives.
    """
    deadline = time.monotonic() + _SWEEP_KILL_S
    while (members := _members(leader)) and time.monotonic() < deadline:
        for pid in members:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # not our children: nothing tells of their ends


def _members(leader: tuple[int, int | None]) -> list[int]:
    number, since = leader
    if since is None or start_time_of(number) not in {None, since}:
        return []
    found, own_namespace = [], os.readlink("/proc/self/ns/user")
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split() if entry.isdigit() else []
            if fields and int(fields[3]) == number and int(fields[19]) >= since and fields[0] not in "ZX":
                if os.readlink(f"/proc/{entry}/ns/user") != own_namespace:
                    found.append(int(entry))
    return found


def _passable(folder: Path) -> bool:
    """Whether every user may enter the folder: each one above it lets others through."""
    return all(part.stat().st_mode & stat.S_IXOTH for part in (folder, *folder.parents))


def _delete(folder: Path) -> str | None:
    """Remove a tree; returns why not. Folders that their owner made unreadable are opened first."""
    problems: list[str] = []
    for attempt in range(2):
        problems.clear()
        shutil.rmtree(folder, onerror=lambda _f, path, info: problems.append(f"{path}: {info[1]}"))
        if not folder.exists():
            return None
        if attempt == 0:
            for parent, names, _ in os.walk(folder):
                for name in names:
                    path = os.path.join(parent, name)
                    with contextlib.suppress(OSError):
                        if not os.path.islink(path):
                            os.chmod(path, 0o700)
    return problems[0] if problems else "it is still there"
