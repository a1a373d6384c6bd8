"""An httpx transport whose cost per call does not grow with the number of calls.

httpx's own pool looks at every connection several times at each start and end of a call: 512 calls at once cost seconds
of CPU. Here each call has a transport of its own while it lasts, so every pool holds one connection.
Source: httpcore 1.0, `_async/connection_pool.py`, `_assign_requests_to_connections`.
"""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

_WARM_LANES = 64
"""Free lanes that keep their connection; the rest of a burst is closed."""

_IDLE_CONNECTION_S = 3.0
"""Below the 5 s after which the service (uvicorn) closes an idle connection."""


class Lanes(httpx.AsyncBaseTransport):
    """As many connections as calls at once; a lane that is free again keeps its connection for the next call."""

    def __init__(self, *, tls: bool) -> None:
        self._ssl = httpx.create_ssl_context() if tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._free: list[httpx.AsyncHTTPTransport] = []
        self._all: set[httpx.AsyncHTTPTransport] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request on a lane, which is taken until its response is closed."""
        lane = self._free.pop() if self._free else self._open()
        try:
            response = await lane.handle_async_request(request)
        except BaseException:
            await self._give_back(lane)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)  # noqa: S101 - httpx's contract, for the type checker
        response.stream = _Held(response.stream, lambda: self._give_back(lane))
        return response

    def _open(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=_IDLE_CONNECTION_S)
        lane = httpx.AsyncHTTPTransport(verify=self._ssl, trust_env=False, limits=limits)
        self._all.add(lane)
        return lane

    async def _give_back(self, lane: httpx.AsyncHTTPTransport) -> None:
        if len(self._free) < _WARM_LANES:
            self._free.append(lane)
        else:
            self._all.discard(lane)
            await lane.aclose()

    async def aclose(self) -> None:
        """Close every lane; idempotent."""
        lanes, self._all = self._all, set()
        self._free.clear()
        for lane in lanes:
            await lane.aclose()


class _Held(httpx.AsyncByteStream):
    """A response body that gives its lane back when it is closed."""

    def __init__(self, stream: httpx.AsyncByteStream, give_back: Callable[[], Awaitable[None]]) -> None:
        self._stream = stream
        self._give_back: Callable[[], Awaitable[None]] | None = give_back

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield chunk

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            give_back, self._give_back = self._give_back, None
            if give_back is not None:
                await give_back()
