"""Memory of a sandbox: a control group where this host lets us make one, else a watchdog over its processes.

Out of memory is the agent's own affair: what it started is killed first (`oom_score_adj`), the tool server answers on.
"""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

from prorl_gym.runtimes.spawner import start_time_of
from prorl_gym.toolserver.children import descendants

_WATCH_EVERY_S = 0.5
_REMOVE_S = 1.0
_ABANDONED_S = 600.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_VICTIM_SCORE = "1000"


class MemoryGroups:
    """Control groups below this process's own, version 2 or 1."""

    def __init__(self, parent: Path, limit_file: str, swap_file: str, events_file: str) -> None:
        self._parent = parent
        self._limit_file = limit_file
        self._swap_file = swap_file
        self._events_file = events_file

    @classmethod
    def find(cls) -> "MemoryGroups | None":
        """The groups of this host, proven by making one; None when it lets us make none. Blocks."""
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                below = Path("/sys/fs/cgroup") / path.lstrip("/")
                groups = cls(below, "memory.max", "memory.swap.max", "memory.events")
            elif "memory" in controllers.split(","):
                below = Path("/sys/fs/cgroup/memory") / path.lstrip("/")
                groups = cls(below, "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control")
            else:
                continue
            with contextlib.suppress(OSError):
                probe = groups.make(f"prorl_gym-probe-{os.getpid()}", 1 << 30)
                usable = (probe / "cgroup.procs").exists()
                remove_group(probe)
                if usable:
                    groups._sweep()
                    return groups
        return None

    def _sweep(self) -> None:
        """Remove empty groups of services that were killed; one with processes in it cannot be removed."""
        for group in self._parent.glob("prorl_gym-*"):
            with contextlib.suppress(OSError):
                if group.stat().st_mtime < time.time() - _ABANDONED_S:
                    group.rmdir()

    def make(self, name: str, limit_bytes: int) -> Path:
        """A group with a limit. Blocks.

        Raises:
            OSError: It cannot be made; nothing is left.
        """
        group = self._parent / name
        group.mkdir()
        try:
            (group / self._limit_file).write_text(str(limit_bytes))
        except OSError:
            group.rmdir()
            raise
        with contextlib.suppress(OSError):  # no swap accounting on this kernel
            (group / self._swap_file).write_text("0" if self._swap_file.endswith("swap.max") else str(limit_bytes))
        return group

    def kills(self, group: Path) -> int:
        """Processes of the group that were killed for memory so far."""
        try:
            fields = dict(line.split() for line in (group / self._events_file).read_text().splitlines())
        except (OSError, ValueError):
            return 0
        return int(fields.get("oom_kill", 0))


def remove_group(group: Path) -> None:
    """Remove an empty group; its last process may still be on its way out. Blocks."""
    deadline = time.monotonic() + _REMOVE_S
    while True:
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
        else:
            return


class MemoryWatchdog:
    """Looks at sandboxes' memory every half second and kills the largest process of one that is over its limit."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[int | None, int]] = {}
        self._kills: dict[int, int] = {}
        self._task: asyncio.Task[None] | None = None

    def watch(self, pid: int, start_time: int | None, limit_bytes: int) -> None:
        """Begin with a process tree."""
        self._watched[pid] = (start_time, limit_bytes)
        self._kills[pid] = 0
        if self._task is None:
            self._task = asyncio.create_task(self._watch())

    def forget(self, pid: int) -> None:
        """End with it; harmless when unknown."""
        self._watched.pop(pid, None)
        self._kills.pop(pid, None)

    def kills(self, pid: int) -> int:
        """Processes of the tree that were killed so far."""
        return self._kills.get(pid, 0)

    async def stop(self) -> None:
        """End; idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            for pid in await asyncio.to_thread(self._enforce, dict(self._watched)):
                if pid in self._kills:
                    self._kills[pid] += 1

    def _enforce(self, watched: dict[int, tuple[int | None, int]]) -> list[int]:
        return [
            pid
            for pid, (start_time, limit_bytes) in watched.items()
            if start_time_of(pid) == start_time and _relieve(pid, limit_bytes)
        ]


def _relieve(pid: int, limit_bytes: int) -> bool:
    """Kill the largest process below `pid` that the agent started, when all together are over the limit."""
    tree = [(below, start_time_of(below)) for below in [pid, *descendants(pid)]]
    if sum(_resident(below) for below, _ in tree) <= limit_bytes:
        return False
    sizes = {below: _proportional(below) for below, _ in tree}  # shared pages counted once
    if sum(sizes.values()) <= limit_bytes:
        return False
    candidates = [(sizes[below], below, start) for below, start in tree if _is_victim(below)]
    if not candidates:
        return False
    _, victim, start = max(candidates)
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(victim)
        try:
            if start_time_of(victim) == start:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration, ValueError):
        return _resident(pid)


def _is_victim(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == _VICTIM_SCORE
    except OSError:
        return False
