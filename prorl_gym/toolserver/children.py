"""The tool server's child processes.

The invariant: one place waits for children. The tool server may be PID 1 of its sandbox, so it also reaps orphans that
it never started.
"""

import contextlib
import ctypes
import os
import signal
import threading
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_libc = ctypes.CDLL(None, use_errno=True)


def hide_memory() -> None:
    """Make this process unreadable for others of the same user: no ptrace, no /proc/PID/mem or fd."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, as PID 1 of a namespace would."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends; undone by a change of user."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, parents first, as /proc shows them now."""
    found: list[int] = []
    queue = [pid]
    while queue:
        parent = queue.pop()
        for task in _listdir(f"/proc/{parent}/task"):
            with contextlib.suppress(OSError):
                children = [int(c) for c in Path(f"/proc/{parent}/task/{task}/children").read_text().split()]
                found += children
                queue += children
    return found


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


class Children:
    """Exit statuses of the children that were announced with `own`; every other child is reaped and forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owned: dict[int, int | None] = {}

    def own(self, pid: int) -> None:
        """Keep the exit status of this child until `forget`."""
        with self._lock:
            self._owned.setdefault(pid, None)

    def forget(self, pid: int) -> None:
        """The status is no longer wanted."""
        with self._lock:
            self._owned.pop(pid, None)

    def reap(self) -> None:
        """Collect every child that has ended, and have owned ones that were stopped go on: nobody else would."""
        with self._lock:
            self._continue_stopped()
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    return
                if pid == 0:
                    return
                if pid in self._owned:
                    self._owned[pid] = os.waitstatus_to_exitcode(status)

    def _continue_stopped(self) -> None:
        for pid in self._owned:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG) is not None:
                    os.kill(pid, signal.SIGCONT)

    def status(self, pid: int) -> int | None:
        """Exit code of an owned child (negative: killed by that signal); None while it runs."""
        self.reap()
        with self._lock:
            return self._owned.get(pid)
