"""The persistent Python session, seen from the tool server: IPython in a child process of its own."""

import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Mapping

from .children import Children
from .interpreter import Interpreter, StartFailed

_FLAGS = ("-I", "-S", "-B", "-X", "utf8")
CONTROL_FD, STATUS_FD, TEXT_FD = 3, 4, 5


class PythonSession(Interpreter):
    """One Python process; killed and started anew when it does not react."""

    title = "Python process"
    lost = "variables and imports are gone"
    has_exit_codes = False

    def __init__(self, workdir: str, environment: Mapping[str, str], children: Children) -> None:
        self._workdir = workdir
        self._environment = dict(environment)
        self._children = children
        self._control = -1
        self._text = os.memfd_create("cell")
        self._interrupted_at = 0.0

    def start(self) -> None:
        """Start Python; see the base class."""
        control_read, self._control = os.pipe()
        self.status_fd, status_write = os.pipe()
        self.output_fd, output_write = os.pipe()
        null = os.open("/dev/null", os.O_RDONLY)
        # The sources are moved out of the way first: a later dup2 must not overwrite one of them.
        high = [
            fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64)
            for descriptor in (control_read, status_write, self._text, output_write)
        ]
        control_high, status_high, text_high, output_high = high
        actions = [
            (os.POSIX_SPAWN_DUP2, null, 0),
            (os.POSIX_SPAWN_DUP2, output_high, 1),
            (os.POSIX_SPAWN_DUP2, output_high, 2),
            (os.POSIX_SPAWN_DUP2, control_high, CONTROL_FD),
            (os.POSIX_SPAWN_DUP2, status_high, STATUS_FD),
            (os.POSIX_SPAWN_DUP2, text_high, TEXT_FD),
        ]
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, *_FLAGS, sys.argv[0], "--python", self._workdir],
                self._environment,
                file_actions=actions,
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT],
            )
        except OSError as error:
            self.kill()
            raise StartFailed(f"Python could not be started: {error}") from None
        finally:
            for descriptor in (control_read, status_write, output_write, null, *high):
                os.close(descriptor)
        self._children.own(self.pid)
        self.pid_fd = os.pidfd_open(self.pid)
        os.set_blocking(self.output_fd, False)
        os.set_blocking(self.status_fd, False)

    def submit(self, text: str, nonce: str) -> None:
        """Run a cell; see the base class."""
        self._interrupted_at = 0.0
        raw = text.encode("utf-8", "replace")
        os.ftruncate(self._text, 0)
        os.pwrite(self._text, raw, 0)
        os.write(self._control, nonce.encode() + b"\n")

    def interrupt(self, nonce: str, *, hard: bool) -> None:
        """KeyboardInterrupt; hard also interrupts the programs that the cell waits for."""
        if self.pid is None:
            return
        with contextlib.suppress(OSError):
            now = time.monotonic()
            if not hard:
                self._interrupted_at = now
                signal.pidfd_send_signal(self.pid_fd, signal.SIGINT)
            elif self._interrupted_at:
                self._interrupted_at = 0.0  # once: a second KeyboardInterrupt would hit the handling of the first
                os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """End the process; see the base class. What it started lives on, as with the shell."""
        if self.pid is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.pid_fd, signal.SIGKILL)
            self._children.forget(self.pid)
            self.pid = None
        self._close_descriptors()
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def folder(self) -> str | None:
        """The session's working directory."""
        try:
            return os.readlink(f"/proc/{self.pid}/cwd")
        except OSError:
            return None
