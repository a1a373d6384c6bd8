"""A process that a command starts and that never outlives it.

The invariant: `stop`, leaving the `with` block, and the death of this process in any way all end the child.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from prorl_gym.errors import ConfigError, ProrlGymError

_PR_SET_PDEATHSIG = 1
_LOOK_AGAIN_S = 0.05
_TAIL_LINES = 12
WATCH_FD = "{watch_fd}"
"""Stands in a child's arguments for a descriptor that reads end-of-file once this process is gone."""


class ChildProcess:
    """One `python -m MODULE` with its output in a log file; a context manager.

    It runs in a session of its own, so that Ctrl-C reaches this process alone, which then ends it in order.

    Args:
        name: For messages.
        arguments: After the interpreter's own name, e.g. `["-m", "prorl_gym"]`.
        log: Where its stdout and stderr go.
        grace_s: Between SIGTERM and SIGKILL.
    """

    def __init__(self, name: str, arguments: Sequence[str], log: Path, *, grace_s: float = 30.0) -> None:
        self.name = name
        self.log = log
        self._arguments = list(arguments)
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None

    def start(self) -> None:
        """Start it; it dies with the thread that calls this, so call it from the main one."""
        reading, self._lifeline = os.pipe()
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, *(part.format(watch_fd=reading) if part == WATCH_FD else part
                                       for part in self._arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[reading] if WATCH_FD in self._arguments else [],
                    start_new_session=True,
                    preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509 - no other thread runs yet
                )  # fmt: skip
        finally:
            os.close(reading)

    @property
    def pid(self) -> int | None:
        """Of the child, once started."""
        return self._process.pid if self._process else None

    def check(self) -> None:
        """Raise when it has ended.

        Raises:
            ConfigError: It refused its configuration; in its own words.
            ProrlGymError: It ended otherwise; with the end of its log.
        """
        code = self._process.poll() if self._process else None
        if code is None:
            return
        tail = self.log.read_text(errors="replace").strip().splitlines()[-_TAIL_LINES:]
        refusals = [line.removeprefix("error: ") for line in tail if line.startswith("error: ")]
        if code == 2 and refusals:
            raise ConfigError(f"{self.name}: {refusals[-1]}")
        shown = "\n".join(f"  {line}" for line in tail)
        raise ProrlGymError(f"the {self.name} ended with code {code}; the end of {self.log}:\n{shown}")

    def wait_for_address(self, file: Path, timeout_s: float) -> str:
        """The address it writes to `file` once it listens.

        Raises:
            ConfigError: As `check`.
            ProrlGymError: As `check`, or it took longer.
        """
        deadline = time.monotonic() + timeout_s
        while not file.is_file():
            self.check()
            if time.monotonic() > deadline:
                raise ProrlGymError(f"the {self.name} did not listen within {timeout_s:.0f} s; see {self.log}")
            time.sleep(_LOOK_AGAIN_S)
        return file.read_text().strip()

    def stop(self) -> None:
        """End it: SIGTERM, grace, SIGKILL for its session. Harmless twice; a second Ctrl-C skips the grace."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(self._grace_s)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                # On Ctrl-C `wait` waits a moment more and may have reaped it. Until then the session's id is its own.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()


def _die_with(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None)

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before the kernel was told

    return in_child
