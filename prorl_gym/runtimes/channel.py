"""The host's end of a tool server's socket: requests out, answers matched by id, everything bounded."""

import asyncio
import itertools
import socket
from typing import Any, cast

from prorl_gym.errors import SandboxError
from prorl_gym.toolserver.frames import FrameBuffer, FrameError, pack


class ToolChannel(asyncio.Protocol):
    """One connection. Requests may overlap; a cancelled one is interrupted inside and its answer dropped."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._frames = FrameBuffer()
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._numbers = itertools.count(1)
        self._lost: str | None = "the tool server was never connected"
        self.closed = asyncio.Event()

    @classmethod
    async def connect(cls, end: socket.socket) -> "ToolChannel":
        """Take over a connected socket."""
        end.setblocking(False)
        _, channel = await asyncio.get_running_loop().create_unix_connection(cls, sock=end)
        return channel

    async def request(
        self, header: dict[str, Any], body: bytes = b"", *, within_s: float
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request and wait for its answer.

        Raises:
            SandboxError: The connection is gone, the request is over the frame limits, or no answer came in time.
        """
        if self._transport is None or self._lost is not None:
            raise SandboxError(f"the tool server is gone: {self._lost}")
        number = next(self._numbers)
        try:
            frame = pack({"id": number, **header}, body)
        except FrameError as error:
            raise SandboxError(str(error)) from error
        answer: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._transport.write(frame)
        answered = False
        try:
            async with asyncio.timeout(within_s):
                reply = await answer
            answered = True
            return reply
        except TimeoutError:
            raise SandboxError(f"the tool server did not answer within {within_s:g} s") from None
        finally:
            self._waiting.pop(number, None)
            if not answered and self._lost is None:
                self._transport.write(pack({"id": number, "op": "cancel"}))

    def send(self, header: dict[str, Any]) -> None:
        """Send something that has no answer; nothing happens when the connection is gone."""
        if self._transport is not None and self._lost is None:
            self._transport.write(pack({"id": next(self._numbers), **header}))

    def close(self, why: str) -> None:
        """Drop the connection; harmless when it is gone."""
        if self._lost is None:
            self._lose(why)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport, self._lost = cast(asyncio.WriteTransport, transport), None

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        try:
            for header, body in self._frames.feed(data):
                answer = self._waiting.get(header.get("id", 0))
                if answer is not None and not answer.done():
                    answer.set_result((header, body))
        except FrameError as error:
            self.close(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        if self._lost is None:
            self._lose(str(exc) if exc else "it closed the connection")
        self.closed.set()

    def _lose(self, why: str) -> None:
        self._lost = why
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(SandboxError(f"the tool server is gone: {why}"))
