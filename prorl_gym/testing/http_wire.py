"""The few parts of HTTP/1.1 that a test server needs, as one asyncio protocol: cheap, and able to misbehave.

A connection serves one request at a time; whoever holds an `Exchange` answers it, cuts it or leaves it open, and is
told when the client goes away first.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast

import httptools


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and the way to answer it."""

    method: str
    path: str
    query: str
    headers: dict[bytes, bytes]
    body: bytes
    keep_alive: bool
    connection: HttpConnection
    lost: list[Callable[[], None]] = field(default_factory=list)

    def answer(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        """Send a whole reply and serve the connection's next request."""
        self.connection.send(self, _head(status, len(body), content_type, self.keep_alive) + body)

    def die_mid_body(self, status: int, body: bytes) -> None:
        """Send the head and half the body, then close."""
        self.connection.cut(_head(status, len(body), "application/json", self.keep_alive) + body[: len(body) // 2])

    def refuse(self) -> None:
        """Close without a byte."""
        self.connection.cut(b"")


def _head(status: int, length: int, content_type: str, keep_alive: bool) -> bytes:
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = "Unknown"
    close = "" if keep_alive else "connection: close\r\n"
    return (
        f"HTTP/1.1 {status} {reason}\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n{close}\r\n"
    ).encode()


class HttpConnection(asyncio.Protocol):
    """One client connection; `handler` gets each complete request."""

    def __init__(self, handler: Callable[[Exchange], None], connections: set[HttpConnection]) -> None:
        self._handler = handler
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[Exchange] = deque()
        self._current: Exchange | None = None
        self._start_message()

    def _start_message(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Turn Nagle's algorithm off: kept-alive replies would wait 40 ms for the client's delayed ACK."""
        self._transport = cast("asyncio.Transport", transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the holder of an unanswered request that its client is gone."""
        self._connections.discard(self)
        self._transport = None
        self._waiting.clear()
        current, self._current = self._current, None
        if current is not None:
            for callback in current.lost:
                callback()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; what is no HTTP ends the connection."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.cut(_head(400, 0, "text/plain", keep_alive=False))

    def on_message_begin(self) -> None:
        """Parser callback."""
        self._start_message()

    def on_url(self, url: bytes) -> None:
        """Parser callback; a long URL comes in pieces."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Parser callback."""
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        """Parser callback; a long body comes in pieces."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Parser callback: hand the request over, or queue it behind the one that is being answered."""
        path, _, query = self._url.decode("latin-1").partition("?")
        exchange = Exchange(
            method=self._parser.get_method().decode("latin-1"),
            path=path,
            query=query,
            headers=self._headers,
            body=b"".join(self._body),
            keep_alive=self._parser.should_keep_alive(),
            connection=self,
        )
        if self._current is None:
            self._current = exchange
            self._handler(exchange)
        else:
            self._waiting.append(exchange)

    def send(self, exchange: Exchange, raw: bytes) -> None:
        """Write a whole reply, unless the client left; then go on with the next request."""
        if self._transport is None or self._current is not exchange:
            return
        self._transport.write(raw)
        self._current = self._waiting.popleft() if self._waiting else None
        if not exchange.keep_alive:
            self._transport.close()
        elif self._current is not None:
            self._handler(self._current)

    def cut(self, raw: bytes) -> None:
        """Write `raw` and close the connection: nobody counts as having left."""
        self._current = None
        self._waiting.clear()
        if self._transport is not None:
            if raw:
                self._transport.write(raw)
            self._transport.close()

    def abort(self) -> None:
        """Drop the connection at once."""
        self._current = None
        if self._transport is not None:
            self._transport.abort()
