"""Frames between host and tool server: u32 header length, u32 body length, JSON header, raw body.

The invariant: a peer that announces more than the limits is cut off before a byte of it is kept.
"""

import json
import struct
from collections.abc import Iterator
from typing import Any

MAX_HEADER_BYTES = 64 << 10
MAX_BODY_BYTES = 64 << 20
_PREFIX = struct.Struct(">II")


class FrameError(Exception):
    """The peer sent something that is no frame, or one over the limits."""


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """One frame, ready to send.

    Raises:
        FrameError: Header or body is over its limit.
    """
    head = json.dumps(header, separators=(",", ":")).encode()
    if len(head) > MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES:
        raise FrameError(f"frame of {len(head)} + {len(body)} bytes is over {MAX_HEADER_BYTES} + {MAX_BODY_BYTES}")
    return b"".join((_PREFIX.pack(len(head), len(body)), head, body))


class FrameBuffer:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, chunk: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Add what was received; yields every frame that is now whole.

        Raises:
            FrameError: The stream is no frame stream, or a frame is over its limit.
        """
        self._bytes += chunk
        while len(self._bytes) >= _PREFIX.size:
            head_bytes, body_bytes = _PREFIX.unpack_from(self._bytes)
            if head_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
                raise FrameError(f"peer announced a frame of {head_bytes} + {body_bytes} bytes")
            end = _PREFIX.size + head_bytes + body_bytes
            if len(self._bytes) < end:
                return
            head = bytes(self._bytes[_PREFIX.size : _PREFIX.size + head_bytes])
            body = bytes(self._bytes[_PREFIX.size + head_bytes : end])
            del self._bytes[:end]
            try:
                header = json.loads(head)
            except ValueError as error:
                raise FrameError(f"header is no JSON: {error}") from None
            if not isinstance(header, dict):
                raise FrameError("header is no JSON object")
            yield header, body
