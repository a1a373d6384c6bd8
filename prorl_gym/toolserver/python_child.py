"""The persistent Python session, seen from inside: IPython's shell, driven directly.

A kernel over ZMQ costs 5 to 40 ms a cell and ipykernel's in-process client as much; the bare shell costs half a
millisecond. Output goes through file descriptors 1 and 2, so that what subprocesses and C code print is caught too, in
order. The invariant: only the process that was started reports; a child that a cell forked ends with the cell.
"""

import builtins
import contextlib
import os
import signal
import site
import sys
import warnings
from os import _exit, dup2, fstat, getpid, pread, read, write  # by name: a cell may replace what `os` holds
from pathlib import Path
from typing import Any, NoReturn

from .interpreter import end_mark
from .python_session import CONTROL_FD, STATUS_FD, TEXT_FD

_SHOWN_FRAMES = 12


def main(workdir: str) -> None:
    """Serve cells until the control descriptor ends."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    for descriptor in (CONTROL_FD, STATUS_FD, TEXT_FD):
        os.set_inheritable(descriptor, False)
    marks = os.dup(1)
    with contextlib.suppress(OSError):
        os.chdir(workdir)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = getpid()
    shell = _make_shell()
    pending = b""
    while chunk := read(CONTROL_FD, 4096):
        *nonces, pending = (pending + chunk).split(b"\n")
        for nonce in nonces:
            _restore_streams(marks)
            ok = _run(shell, pread(TEXT_FD, fstat(TEXT_FD).st_size, 0).decode("utf-8", "replace"))
            _flush()
            if getpid() != owner:
                _exit(0)
            write(marks, end_mark(nonce.decode()))
            write(STATUS_FD, nonce + (b" 0\n" if ok else b" 1\n"))


def _run(shell: Any, code: str) -> bool:
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            shell.told = False
            result = shell.run_cell(code, store_history=True)
            if not result.success and not shell.told:
                _tell(result.error_before_exec or result.error_in_exec)
                if not shell.run_cell("0;", silent=True).success:
                    raise RuntimeError
            return bool(result.success)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:  # between two lines of IPython's own code
        print("KeyboardInterrupt", file=sys.__stderr__)
    except SystemExit:
        pass
    except BaseException:  # noqa: BLE001 - nothing that a cell did not break gets here
        write(2, b"a cell has changed functions that Python itself needs: no other cell can run\n")
        _exit(1)
    return False


def _tell(error: BaseException | None) -> None:
    """Say what IPython could not, because a cell has broken what it says it with."""
    if error is not None and type(error).__name__ not in {"UsageError", "KeyboardInterrupt"}:
        write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))


def _restore_streams(output: int) -> None:
    """Undo what an earlier cell did to the streams for good: closed descriptors, objects that cannot be written."""
    dup2(output, 1)
    dup2(output, 2)
    for name in ("stdout", "stderr"):
        if getattr(getattr(sys, name, None), "closed", True):
            setattr(sys, name, getattr(sys, f"__{name}__", None))


def _flush() -> None:
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        with contextlib.suppress(Exception):  # a cell may have put anything there
            getattr(sys, name).flush()


def _make_shell() -> Any:
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.error import StdinNotImplementedError
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Hook(DisplayHook):  # type: ignore[misc]
        """The value of the last expression, without a prompt before it."""

        def write_output_prompt(self) -> None:
            pass

    class Publisher(DisplayPublisher):  # type: ignore[misc]
        """`display()`: text is printed, a picture is saved and named."""

        saved = 0

        def publish(self, data: dict[str, Any], metadata: Any = None, **_: Any) -> None:
            picture = data.get("image/png")
            if picture is not None:
                folder = Path(os.environ.get("TMPDIR", "/tmp"), "pictures")  # noqa: S108 - inside the sandbox
                folder.mkdir(exist_ok=True)
                self.saved += 1
                target = folder / f"{self.saved}.png"
                target.write_bytes(picture)
                print(f"[picture saved as {target}]")  # noqa: T201
            elif "text/plain" in data:
                print(data["text/plain"])  # noqa: T201

    def refuse(prompt: object = "") -> NoReturn:
        raise StdinNotImplementedError("input() is not available here: nobody can type")

    class Shell(InteractiveShell):  # type: ignore[misc]
        """IPython's shell without a terminal."""

        told = False
        displayhook_class = Hook
        display_pub_class = Publisher

        def ask_exit(self) -> None:
            print("[the session goes on: there is nothing to exit]")  # noqa: T201

        def init_readline(self) -> None:
            pass

        def _showtraceback(self, etype: object, evalue: object, stb: list[str]) -> None:
            """Straight to the output: what a cell put in place of `sys.stdout` may hide or refuse it."""
            if len(stb) > 2 * _SHOWN_FRAMES:
                left_out = f"  [{len(stb) - 2 * _SHOWN_FRAMES} more]"
                stb = [*stb[:_SHOWN_FRAMES], left_out, *stb[-_SHOWN_FRAMES:]]
            self.told = True
            _flush()
            with os.fdopen(os.dup(1), "wb") as output:
                output.write(self.InteractiveTB.stb2text(stb).encode("utf-8", "replace") + b"\n")

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.xmode = "Plain"
    config.InteractiveShell.cache_size = 100  # of Out[]: each entry keeps its object alive
    shell = Shell.instance(config=config)
    with contextlib.suppress(Exception):  # the name differs between IPython 8 and 9; escapes are stripped in any case
        shell.colors = "nocolor"
    shell.display_formatter.active_types = ["text/plain", "image/png"]  # the others are never shown, and cost time
    shell.system = shell.system_raw
    warnings.filterwarnings("ignore", message="To exit: use")
    site.sethelper()
    builtins.input = refuse
    import getpass

    getpass.getpass = refuse  # type: ignore[assignment]
    sys.path.insert(0, "")
    return shell
