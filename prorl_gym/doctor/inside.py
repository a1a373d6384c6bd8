"""What the checks run inside a sandbox: its source is the cell that IPython executes there, in the tools' own Python.

Nothing here is imported by the service for its own use. Each function returns what JSON can hold, and is bounded: in
memory by 300 MB, in processes by its argument, in time by seconds.
"""

import contextlib
import errno
import glob
import os
import signal
import socket
import time
from typing import Any

_CONNECT_S = 1.0
_HOLD_S = 4.0
_CHUNK = 8 << 20
_DESCRIPTORS = 16
_kept: list[socket.socket] = []


def pid_namespace() -> str:
    """Which one this is."""
    return os.readlink("/proc/self/ns/pid")


def reaches(port: int, name: str) -> list[str]:
    """What of the host's network answers: a port of its loopback, an abstract socket, a route to anywhere."""
    targets: list[tuple[str, int, int, Any]] = [
        (f"the host's 127.0.0.1:{port}", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)),
        ("the host's abstract sockets", socket.AF_UNIX, socket.SOCK_STREAM, f"\0{name}"),
        ("an IPv4 route", socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 9)),  # connecting sends nothing
        ("an IPv6 route", socket.AF_INET6, socket.SOCK_DGRAM, ("2001:db8::1", 9)),
    ]
    found = []
    for words, family, kind, address in targets:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.settimeout(_CONNECT_S)
            probe.connect(address)
            found.append(words)
    return found


def talks_to_itself() -> str | None:
    """Why a server on loopback cannot be reached from here; None when it can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_CONNECT_S)
            with socket.create_connection(server.getsockname(), timeout=_CONNECT_S) as client:
                accepted, _ = server.accept()
                with accepted:
                    accepted.sendall(b"hi")
                    return None if client.recv(2) == b"hi" else "nothing came through"
    except OSError as error:
        return str(error)


def listens(address: str, port: int) -> str | None:
    """Why nothing can listen there; None when something does now, until the sandbox ends."""
    try:
        _kept.append(socket.create_server((address, port)))
    except OSError as error:
        return str(error)
    return None


def variable(name: str) -> str | None:
    """Of the environment here."""
    return os.environ.get(name)


def plant(marker: str) -> list[str]:
    """Leave a file of that name wherever one may write; where that was."""
    planted = []
    for folder in (os.getcwd(), "/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~")):  # noqa: S108 - what is tried
        path = os.path.join(folder, marker)
        with contextlib.suppress(OSError), open(path, "w") as file:
            file.write(marker)
            planted.append(path)
    return planted


def uproot(paths: list[str]) -> None:
    """Remove what was planted."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def readable(paths: list[str]) -> list[str]:
    """Which of these files and folders can be looked into."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            if os.path.isdir(path):
                os.listdir(path)
            else:
                open(path, "rb").close()
            found.append(path)
    return found


def sees_own_processes() -> bool:
    """Whether /proc is of the same process ids as this process."""
    return os.readlink("/proc/self") == str(os.getpid())


def processes_with(marker: str) -> list[int]:
    """Processes whose command line or environment can be seen from here to hold the marker."""
    found = set()
    for path in [*glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/cmdline")]:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if marker.encode() in file.read():
                found.add(int(path.split("/")[2]))
    return sorted(found)


def attacks_tool_server() -> list[str]:
    """What may be done to process 1, the sandbox's own tool server. It may be killed by this, if the sandbox is bad."""
    done = []
    for number in range(_DESCRIPTORS):  # root of a user namespace may list them, which opens none
        with contextlib.suppress(OSError):
            os.readlink(f"/proc/1/fd/{number}")
            done.append(f"its descriptor {number} can be followed")
    with contextlib.suppress(OSError):
        open("/proc/1/mem", "rb").close()
        done.append("its memory can be opened")
    with contextlib.suppress(OSError):
        os.kill(1, signal.SIGKILL)
    return done


def takes_memory(size_bytes: int) -> dict[str, Any]:
    """Have a child take and hold that much; `held` tells whether it was let."""
    child = os.fork()
    if child == 0:
        try:
            parts = []
            for _ in range(size_bytes // _CHUNK):
                parts.append(bytearray(b"x" * _CHUNK))
            time.sleep(_HOLD_S)  # whoever enforces by looking has time to look
            os._exit(0)
        except MemoryError:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return {"held": status == 0, "status": os.waitstatus_to_exitcode(status)}


def starts_processes(count: int) -> int:
    """How many of `count` further processes can be there at once."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        while len(children) < count:
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            children.append(child)
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    return len(children)


def writes(size_bytes: int, file_bytes: int) -> dict[str, Any]:
    """Fill files of `file_bytes` up to `size_bytes` together, and remove them."""
    written, stopped = 0, None
    names: list[str] = []
    try:
        while written < size_bytes:
            names.append(f"fill-{len(names)}")
            with open(names[-1], "wb", buffering=0) as file:
                while file.tell() < file_bytes:
                    written += file.write(b"x" * min(1 << 20, file_bytes - file.tell()))
    except OSError as error:
        stopped = errno.errorcode.get(error.errno or 0, str(error))
    for name in names:
        os.unlink(name)
    return {"written": written, "stopped": stopped}


def leaves_processes(count: int) -> int:
    """Leave processes in sessions of their own that ignore polite signals, as a careless agent does."""
    for _ in range(count):
        if os.fork() == 0:
            os.setsid()
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(600)
            os._exit(0)
    return count
