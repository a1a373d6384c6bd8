"""What a tool server may do beyond its agent, as root of its user namespace, and how it gives that up for good.

The invariant: before the agent's first process exists, nothing that it will ever start can mount, look into the tool
server, or return to a network that was taken away.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import time
from pathlib import Path

from .children import Children, descendants

_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
_MS_REMOUNT = 32
_PR_CAPBSET_DROP = 24
_CAP_SYS_PTRACE, _CAP_SYS_ADMIN = 19, 21
_CAPABILITY_VERSION = 0x20080522
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_libc = ctypes.CDLL(None, use_errno=True)


def take_network() -> None:
    """Leave the network for an empty one with loopback up; to be called while this process has a single thread.

    Raises:
        OSError: The host does not let it.
    """
    if _libc.unshare(_CLONE_NEWNET) != 0:
        uid, gid = os.geteuid(), os.getegid()
        _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET))
        with contextlib.suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack_from("16sh", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def bound_disk(size_bytes: int) -> None:
    """Set the size of the file system in memory that holds all that this sandbox writes.

    Raises:
        OSError: It cannot be set.
    """
    flags = os.statvfs("/dev").f_flag & 0x0F  # read-only, nosuid, nodev, noexec: these may not be loosened
    _check(_libc.mount(b"none", b"/dev", b"none", _MS_REMOUNT | flags, f"size={size_bytes}".encode()))
    with contextlib.suppress(OSError):
        os.chmod("/dev/shm", 0o1777)  # noqa: S108, S103 - its own, as everywhere


def give_up_privileges() -> None:
    """Drop what would let the agent mount or trace, from this thread, its children and whatever they execute."""
    for capability in (_CAP_SYS_PTRACE, _CAP_SYS_ADMIN):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()
    if _libc.capget(header, sets) == 0:
        for index in range(3):  # effective, permitted, inheritable: the lower 32 of each
            sets[index] = sets[index] & ~(1 << _CAP_SYS_PTRACE | 1 << _CAP_SYS_ADMIN) if os.geteuid() == 0 else 0
            sets[index + 3] = sets[index + 3] if os.geteuid() == 0 else 0
        _libc.capset(header, sets)


def end_everything_else(children: Children, within_s: float) -> None:
    """Kill every process below this one.

    Raises:
        OSError: Some would not end.
    """
    deadline = time.monotonic() + within_s
    while below := descendants(os.getpid()):
        if time.monotonic() > deadline:
            raise OSError(f"processes of the setup did not end: {below}")
        for pid in below:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        children.reap()
        time.sleep(0.005)  # the children's ends are not worth a selector here


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
