"""The tool server's main loop.

The invariants: the connection is a socket end that was inherited, so nothing inside the sandbox can reach or replace
it; requests are answered in any order; the end of the connection ends the server and everything it started.
"""

import contextlib
import dataclasses
import json
import os
import queue
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .children import Children, adopt_orphans, descendants, hide_memory
from .file_editor import FileEditor
from .files import NotAFile, read_chunk, write_chunk
from .frames import FrameBuffer, FrameError, pack
from .interpreter import Interpreter
from .privileges import bound_disk, end_everything_else, give_up_privileges, take_network
from .python_session import PythonSession
from .session import Call, Reply, Session
from .shell import Shell

_CHUNK = 1 << 18
_OPEN_FILES = 4096
_INTERPRETERS: dict[str, type[Shell] | type[PythonSession]] = {"bash": Shell, "ipython": PythonSession}
_TEXT_ARGUMENT = {"bash": "command", "ipython": "code"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the host decides; arrives with the first request, `hello`: arguments can be read in the process table."""

    workdir: str
    environment: dict[str, str]
    output_bytes: int
    processes: int | None = None
    file_bytes: int | None = None
    disk_bytes: int | None = None
    """For a server that is root of its user namespace; others are given their size by who started them."""
    image_environment: bool = False
    """Whether what the image sets comes first; the service's `environment` goes over it."""
    setting_up: bool = False
    """Whether `seal` follows: privileges are kept until then."""


_IMAGE_INTERNALS = ("APPTAINER_", "SINGULARITY_", "PROMPT_COMMAND", "PS1", "PWD", "USER_PATH")
_SEAL_S = 10.0
_SEALED = "--sealed"


class ToolServer:
    """One connection, served until it ends."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._children = Children()
        self._sessions: dict[str, Session] = {}
        self._calls: dict[int, tuple[Session, Call]] = {}
        self._sending = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[int, Callable[[], None]]] = queue.SimpleQueue()

    def serve(self) -> None:
        """Answer until the host closes the connection, then end every process below this one."""
        threading.Thread(target=self._work, name="files", daemon=True).start()
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wake-up descriptor is written
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        frames, grace_s = FrameBuffer(), 0.0
        with contextlib.suppress(FrameError, ConnectionError, _Shutdown):
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if wake_read.fileno() in ready:
                    with contextlib.suppress(BlockingIOError):
                        wake_read.recv(4096)
                    self._children.reap()
                if self._socket.fileno() in ready:
                    chunk = self._socket.recv(_CHUNK)
                    if not chunk:
                        break
                    for header, body in frames.feed(chunk):
                        if header.get("op") == "shutdown":
                            grace_s = float(header.get("grace_s", 0.0))
                            raise _Shutdown
                        self._dispatch(header, body)
        self._end_all(grace_s)

    def _dispatch(self, header: dict[str, Any], body: bytes) -> None:
        number, operation = int(header["id"]), header.get("op")
        if operation == "call" and header["tool"] in _INTERPRETERS:
            self._submit(number, header["tool"], float(header["timeout_s"]), json.loads(body))
        elif operation == "call":
            arguments = json.loads(body)
            self._jobs.put((number, lambda: self._answer(number, self._edit(arguments))))
        elif operation == "cancel":
            if number in self._calls:
                session, call = self._calls[number]
                session.cancel(call)
        elif operation == "write":
            self._jobs.put((number, lambda: self._write(number, header, body)))
        elif operation == "read":
            self._jobs.put((number, lambda: self._read(number, header)))
        elif operation == "seal":
            self._seal(number)
        else:
            try:
                self._configure(Settings(**json.loads(body)))
            except OSError as error:
                self._fail(number, error)
            else:
                self._send({"id": number, "pid": os.getpid()})

    def _seal(self, number: int) -> None:
        """Start over without a network: what runs is ended, and this program begins anew, as one thread."""
        for session in self._sessions.values():
            session.close()
        try:
            end_everything_else(self._children, _SEAL_S)
        except OSError as error:
            self._fail(number, error)
            return
        self._send({"id": number})
        self._socket.set_inheritable(True)
        os.execv(sys.orig_argv[0], [*sys.orig_argv, _SEALED])  # noqa: S606 - itself

    def _configure(self, settings: Settings) -> None:
        if settings.image_environment:
            ours = {n: v for n, v in os.environ.items() if not n.startswith(_IMAGE_INTERNALS)}
            settings = dataclasses.replace(settings, environment={**ours, **settings.environment})
        self._settings = settings = dataclasses.replace(settings, environment=_with_places(settings.environment))
        os.makedirs(settings.workdir, exist_ok=True)
        if settings.disk_bytes is not None:
            bound_disk(settings.disk_bytes)
        if not settings.setting_up:
            give_up_privileges()
        self._editor = FileEditor(settings.workdir, settings.output_bytes)
        _set_limit(resource.RLIMIT_CORE, 0)
        _set_limit(resource.RLIMIT_NPROC, settings.processes)
        _set_limit(resource.RLIMIT_FSIZE, settings.file_bytes)
        _set_limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
        os.chdir(settings.workdir)

    def _submit(self, number: int, tool: str, timeout_s: float, arguments: dict[str, Any]) -> None:
        session = self._sessions.get(tool)
        if session is None:
            settings = self._settings
            interpreter: Interpreter = _INTERPRETERS[tool](settings.workdir, settings.environment, self._children)
            session = self._sessions[tool] = Session(interpreter, self._children, settings.output_bytes)

        def answer(reply: Reply) -> None:
            self._calls.pop(number, None)
            self._answer(number, reply)

        call = Call(arguments[_TEXT_ARGUMENT[tool]], time.monotonic() + timeout_s, timeout_s, answer)
        self._calls[number] = (session, call)
        session.submit(call)

    def _edit(self, arguments: dict[str, Any]) -> Reply:
        started = time.monotonic()
        reply = self._editor.run(arguments)
        reply.duration_s = time.monotonic() - started
        return reply

    def _write(self, number: int, header: dict[str, Any], body: bytes) -> None:
        try:
            write_chunk(self._path(header), int(header["offset"]), body, header.get("mode"))
        except (OSError, NotAFile, ValueError) as error:  # a path with a NUL, or one that is no UTF-8, is a ValueError
            self._fail(number, error)
        else:
            self._send({"id": number})

    def _read(self, number: int, header: dict[str, Any]) -> None:
        try:
            chunk, size = read_chunk(self._path(header), int(header["offset"]))
        except (OSError, NotAFile, ValueError) as error:
            self._fail(number, error)
        else:
            self._send({"id": number, "size": size}, chunk)

    def _path(self, header: dict[str, Any]) -> str:
        return os.path.join(self._settings.workdir, str(header["path"]))

    def _fail(self, number: int, error: Exception) -> None:
        missing = isinstance(error, FileNotFoundError)
        self._send({"id": number, "failed": str(error)[:2000], "missing": missing})

    def _answer(self, number: int, reply: Reply) -> None:
        if reply.failed is not None:
            self._send({"id": number, "failed": reply.failed[-2000:]})
            return
        header = {
            "id": number, "error": reply.error, "timed_out": reply.timed_out, "exit_code": reply.exit_code,
            "duration_s": round(reply.duration_s, 6), "details": reply.details,
        }  # fmt: skip
        self._send(header, reply.text.encode("utf-8", "replace"))

    def _send(self, header: dict[str, Any], body: bytes = b"") -> None:
        with self._sending, contextlib.suppress(OSError):  # the host is gone: the main loop sees that too
            self._socket.sendall(pack(header, body))

    def _work(self) -> None:
        while True:
            number, job = self._jobs.get()
            try:
                job()
            except Exception as error:  # noqa: BLE001 - this one failed; the thread is there for the next
                self._fail(number, error)

    def _end_all(self, grace_s: float) -> None:
        """Ask what the agent left running to end, then force it. As PID 1 the kernel does the rest at our exit."""
        for session in self._sessions.values():
            session.close()
        deadline = time.monotonic() + grace_s
        chosen = signal.SIGTERM if grace_s > 0 else signal.SIGKILL
        give_up = deadline + 2.0
        while (below := descendants(os.getpid())) and time.monotonic() < give_up:
            for pid in below:
                with contextlib.suppress(OSError):
                    os.kill(pid, chosen)
            time.sleep(0.005)  # the children's ends are not worth a selector here
            self._children.reap()
            if time.monotonic() >= deadline:
                if os.getpid() == 1:
                    return
                chosen = signal.SIGKILL


class _Shutdown(Exception):
    """The host asked for the end."""


def main() -> None:
    """Entry point of the process; the arguments decide between the server and the Python session."""
    if sys.argv[1] == "--python":
        from .python_child import main as serve_python

        serve_python(sys.argv[2])
        return
    if sys.argv[-1] == _SEALED:
        take_network()
    hide_memory()
    if os.getpid() == 1:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what PID 1 does not handle, nobody inside can send it
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        adopt_orphans()
    ToolServer(int(sys.argv[1])).serve()
    os._exit(0)  # the tool threads may be in the middle of anything


def _with_places(environment: dict[str, str]) -> dict[str, str]:
    """The environment with a home and a folder for temporary files that exist and can be written, where possible."""
    temporary, home = environment.get("TMPDIR", "/tmp"), environment.get("HOME", "/")  # noqa: S108
    for folder in (temporary, home):
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
    if os.access(home, os.W_OK | os.X_OK):
        return environment
    with contextlib.suppress(OSError):
        os.makedirs(f"{temporary}/home", exist_ok=True)
    return {**environment, "HOME": f"{temporary}/home"}


def _set_limit(which: int, value: int | None) -> None:
    if value is None:
        return
    hard = resource.getrlimit(which)[1]
    wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (wanted, wanted))
