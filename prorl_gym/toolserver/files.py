"""Whole files in and out, for the host.

This runs inside the sandbox as the sandbox's own user: a link, whatever it points at, resolves here and nowhere else.
"""

import os
import stat
from pathlib import Path

CHUNK_BYTES = 8 << 20


class NotAFile(Exception):
    """The path is a folder, pipe, device or socket."""


def write_chunk(path: str, offset: int, chunk: bytes, mode: int | None) -> None:
    """Write one part of a file; offset 0 creates or empties it, parents included.

    Raises:
        OSError: It could not be written.
        NotAFile: The path is not a regular file.
    """
    if offset == 0:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags | (os.O_TRUNC if offset == 0 else 0), 0o644)
    try:
        _check_regular(descriptor, path)
        if mode is not None:
            os.fchmod(descriptor, mode)
        view = memoryview(chunk)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(descriptor)


def read_chunk(path: str, offset: int) -> tuple[bytes, int]:
    """One part of a file and the file's whole size.

    Raises:
        OSError: It could not be read.
        NotAFile: The path is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size = _check_regular(descriptor, path)
        return os.pread(descriptor, CHUNK_BYTES, offset), size
    finally:
        os.close(descriptor)


def _check_regular(descriptor: int, path: str) -> int:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise NotAFile(f"{path} is not a regular file")
    return status.st_size
