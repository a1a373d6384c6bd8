"""The persistent bash.

Interactive bash on a terminal of its own, reading control lines from a private pipe: an interrupt makes it drop what it
runs and read on, as for a person at a prompt, so the status line behind each command always comes while the shell
lives. The command's text is sourced from a memory file and never passes through the terminal or the control pipe: its
quoting cannot touch ours, and its length does not matter.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import termios
from collections.abc import Mapping
from pathlib import Path

import ptyprocess

from .children import Children
from .interpreter import Interpreter, StartFailed

_TERMINAL, _TEXT, _STATUS = 210, 211, 212
_PREAMBLE = (
    b"PS1= PS2= HISTFILE=; set +o history +H; builtin unset -v PROMPT_COMMAND MAILCHECK BASH_ENV; "
    b"alias less=cat more=cat most=cat\n"  # which would wait for a key
)
_ROWS_COLUMNS = (50, 200)
_PR_SET_DUMPABLE = 4


class Shell(Interpreter):
    """One bash, restarted on demand in the folder it was last seen in."""

    title = "shell"
    has_exit_codes = True
    lost = "variables, functions and aliases are gone"

    def __init__(self, workdir: str, environment: Mapping[str, str], children: Children) -> None:
        self._folder = workdir
        self._workdir = workdir
        self._environment = dict(environment)
        self._children = children
        self._control = -1
        self._text = os.memfd_create("command")
        self._program = shutil.which("bash", path="/bin:/usr/bin:/usr/local/bin:/opt/prorl/bin")

    def start(self) -> None:
        """Start bash; see the base class."""
        if self._program is None:
            raise StartFailed("this image has no bash")
        control_read, self._control = os.pipe()
        self.status_fd, status_write = os.pipe()
        passed = [control_read, status_write, self._text]

        def arrange() -> None:  # in the child, between fork and exec
            os.dup2(1, _TERMINAL)
            os.dup2(self._text, _TEXT)
            os.dup2(status_write, _STATUS)
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(control_read, 0)
            os.dup2(null, 1)  # of the shell itself: its prompts and job notices
            os.dup2(null, 2)
            for descriptor in (*passed, null):
                os.close(descriptor)
            for ignored in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # bash could never undo an ignored one
                signal.signal(ignored, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self belongs to root
            with contextlib.suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("1000")

        folder = self._folder if os.path.isdir(self._folder) else self._workdir
        try:
            process = ptyprocess.PtyProcess.spawn(
                [self._program, "--noprofile", "--norc", "--noediting", "-i"],
                cwd=folder if os.path.isdir(folder) else "/",
                env=self._environment,
                echo=False,
                preexec_fn=arrange,
                dimensions=_ROWS_COLUMNS,
                pass_fds=passed,
            )
        except Exception as error:  # noqa: BLE001 - ptyprocess re-raises whatever failed in the child, under many types
            self.kill()
            raise StartFailed(f"the shell could not be started: {error}") from None
        finally:
            os.close(control_read)
            os.close(status_write)
        self._children.own(process.pid)
        self.pid, self.pid_fd = process.pid, os.pidfd_open(process.pid)
        self.output_fd = os.dup(process.fd)
        process.closed = True  # its own clean-up sleeps and signals a pid that may be another's by then
        process.fileobj.close()
        os.set_blocking(self.output_fd, False)
        os.set_blocking(self.status_fd, False)
        os.write(self._control, _PREAMBLE)

    def submit(self, text: str, nonce: str) -> None:
        """Run a command; see the base class."""
        self._set_terminal()
        raw = text.encode("utf-8", "replace")
        os.ftruncate(self._text, 0)
        os.pwrite(self._text, raw, 0)
        run = (  # no braces: the redirections are the builtin's own, so that `set -x` says nothing of this line
            f"\\builtin . /dev/fd/{_TEXT} </dev/null 1>&{_TERMINAL} 2>&{_TERMINAL} {_TERMINAL}>&- {_STATUS}>&-\n"
        )
        os.write(self._control, run.encode() + self._report(nonce))

    def _report(self, nonce: str) -> bytes:
        return (
            f"\\builtin printf '%s %s\\n' {nonce} $? >&{_STATUS}; "
            f"\\builtin printf '\\033]prorl:%s\\007' {nonce} >&{_TERMINAL}; \\builtin set +e; "
            "[[ $- != *r* ]] || \\builtin exit\n"  # a restricted shell reads no more commands from us
        ).encode()

    def is_mute(self) -> bool:
        """Whether bash is reading the control pipe again; see the base class. Not known where the kernel hides it."""
        try:
            _, descriptor, *_ = Path(f"/proc/{self.pid}/syscall").read_text().split()
            read_from = os.stat(f"/proc/{self.pid}/fd/{int(descriptor, 16)}")
        except (OSError, ValueError):
            return False
        return read_from.st_ino == os.fstat(self._control).st_ino

    def _set_terminal(self) -> None:
        """Bytes pass unchanged, and a read of /dev/tty finds the end of the input at once instead of waiting."""
        modes = termios.tcgetattr(self.output_fd)
        modes[0] = modes[1] = modes[3] = 0
        modes[6][termios.VMIN] = 0
        modes[6][termios.VTIME] = 0
        termios.tcsetattr(self.output_fd, termios.TCSANOW, modes)

    def interrupt(self, nonce: str, *, hard: bool) -> None:
        """Signal the terminal's foreground group; hard kills it and makes bash itself drop its command."""
        if self.pid is None:
            return
        with contextlib.suppress(OSError):
            group = os.tcgetpgrp(self.output_fd)
            if group > 1 and group != self.pid:
                os.killpg(group, signal.SIGKILL if hard else signal.SIGINT)
            if hard or group == self.pid:
                signal.pidfd_send_signal(self.pid_fd, signal.SIGINT)
            if hard:  # an interrupt may have cost bash the line it was reading; a second report is harmless
                os.write(self._control, b"\n" + self._report(nonce))

    def kill(self) -> None:
        """End the shell and its foreground command; see the base class."""
        if self.pid is not None:
            with contextlib.suppress(OSError):
                group = os.tcgetpgrp(self.output_fd)
                if group > 1 and group != self.pid:
                    os.killpg(group, signal.SIGKILL)
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.pid_fd, signal.SIGKILL)
            self._children.forget(self.pid)
            self.pid = None
        self._close_descriptors()
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def folder(self) -> str | None:
        """The shell's working directory; remembered for the next shell."""
        try:
            self._folder = os.readlink(f"/proc/{self.pid}/cwd")
        except OSError:
            return None
        return self._folder
