"""The small process that starts every sandbox of one service: a plain script on the standard library alone.

Why a process of its own: a sandbox dies with the *thread* that started it, so that thread must last as long as the
service; a fork of a small process is cheap where a fork of the service is not; and it outlives a SIGKILL of the service
just long enough to end what it started.

The invariants: only children that are still unreaped are signalled, so a pid is never another's; when the service's
socket ends, every child is killed and this process exits; children that it did not start are orphans of a dead sandbox
and are killed.

Messages are JSON, one per packet: `{"id", "argv", "env", "cwd", "uid", "cgroups", "binds"}` with the descriptors that
become 1 and 2, 3, 4, ... of the child, answered by `{"id", "pid", "start_time"}` or `{"id", "failed"}`;
`{"signal", "pid"}`; and, from here, `{"exited", "status"}`.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PACKET_BYTES = 1 << 18
_MAX_DESCRIPTORS = 16
_libc = ctypes.CDLL(None, use_errno=True)


def start_time_of(pid: int) -> int | None:
    """Kernel start time of a process in clock ticks since boot; None when there is none. With the pid it is unique."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


class Spawner:
    """One service's children."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._running: set[int] = set()

    def serve(self) -> None:
        """Work until the service closes its end."""
        wake_read, wake_write = socket.socketpair()
        for end in (wake_read, wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if wake_read.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    wake_read.recv(4096)
                self._reap()
            if self._socket.fileno() in ready:
                packet, descriptors = self._receive()
                if not packet:
                    break
                self._handle(json.loads(packet), descriptors)
        self._end_all()

    def _receive(self) -> tuple[bytes, list[int]]:
        """One message; an empty one once the service is gone."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._socket, _PACKET_BYTES, _MAX_DESCRIPTORS)
        except ConnectionResetError:  # it ended with words of ours unread
            return b"", []
        return packet, descriptors

    def _handle(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if "argv" in message:
            try:
                pid = self._start(message, descriptors)
                self._say({"id": message["id"], "pid": pid, "start_time": start_time_of(pid)})
            except OSError as error:
                self._say({"id": message["id"], "failed": str(error)})
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        elif message["pid"] in self._running:
            for kill in (os.killpg, os.kill):  # one that was forked just now leads no group yet
                with contextlib.suppress(OSError):
                    kill(message["pid"], message["signal"])

    def _start(self, message: dict[str, Any], descriptors: list[int]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._running.add(pid)
            return pid
        try:
            _become(message, descriptors, parent)
        except BaseException as error:  # noqa: BLE001 - the child must never return into the parent's loop
            with contextlib.suppress(OSError):
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(127)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self._running:
                self._running.discard(pid)
                self._say({"exited": pid, "status": os.waitstatus_to_exitcode(status)})
        self._kill_orphans()

    def _kill_orphans(self) -> None:
        with contextlib.suppress(OSError):
            for child in map(int, Path("/proc/thread-self/children").read_text().split()):
                if child not in self._running:
                    os.kill(child, signal.SIGKILL)

    def _end_all(self) -> None:
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            for pid in self._running:
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            self._reap()
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            time.sleep(0.005)  # nobody waits for this process any more

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the service is gone: the loop sees that next
            self._socket.send(json.dumps(message).encode())


def _become(message: dict[str, Any], descriptors: list[int], parent: int) -> None:
    """Turn the forked child into what was asked for; does not return."""
    os.setsid()
    high = [_duplicate_high(descriptor) for descriptor in descriptors]
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(high[0], 1)
    os.dup2(high[0], 2)
    for number, descriptor in enumerate(high[1:], 3):
        os.dup2(descriptor, number, inheritable=True)
    os.closerange(2 + len(high), 1 << 16)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for group in message["cgroups"]:
        Path(group, "cgroup.procs").write_text("0")
    if message["binds"]:
        _bind(message["binds"])
    os.chdir(message["cwd"])
    if message["uid"] is not None:
        os.setgroups([])
        os.setresgid(message["uid"], message["uid"], message["uid"])
        os.setresuid(message["uid"], message["uid"], message["uid"])
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after the change of user, which undoes it
    if os.getppid() != parent:
        os._exit(127)
    os.execve(message["argv"][0], message["argv"], message["env"])  # noqa: S606 - an argument list, made by the service


def _bind(files: dict[str, str]) -> None:
    """Put files over others, in a mount namespace of this process's own."""
    _check(_libc.unshare(_CLONE_NEWNS))
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    for place, file in files.items():
        _check(_libc.mount(file.encode(), place.encode(), None, _MS_BIND | _MS_REC, None))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _duplicate_high(descriptor: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 128)


def main() -> None:
    """Entry point: the number of the inherited socket is the only argument."""
    _libc.prctl(_PR_SET_NAME, b"prorl-spawner", 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.setsid()  # a terminal's interrupt is for the service to handle
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Spawner(socket.socket(fileno=int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
