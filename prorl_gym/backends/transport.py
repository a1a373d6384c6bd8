"""How the service talks HTTP to engines: one session per pool, tuned for many long calls at once.

No limit on connections (a hidden one of 100 would cap every batch), no cookie jar (parsing Set-Cookie costs more than a
call), no proxies from the environment, no redirects (they would carry the key elsewhere), bounded replies.
"""

import asyncio
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from prorl_gym.backends.base import ContradictoryReply, Unreachable
from prorl_gym.errors import BackendError

MAX_REPLY_BYTES = 64 << 20
"""About two million tokens with ids, logprobs and text; more is a fault, not a reply."""

_IDLE_CONNECTION_S = 3.0
"""Below the 5 s after which vLLM (uvicorn) closes an idle connection; the other way round, calls race with it."""

_IN_PIECES_BYTES = 1 << 20
"""A longer request is written piece by piece: one write of all of it would hold the event loop."""

_TRANSIENT_STATUSES = frozenset({408, 425, 429, 499})
_QUOTED_CHARS = 400


class EngineHttp:
    """The aiohttp session of one pool; opened at its first use, closed once."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        """Send one request and read the whole reply. Cancelling closes the connection.

        Raises:
            Unreachable: No connection within the connect timeout.
            BackendError: Broke off, too large, or not complete within `timeout_s` (that one is not retryable).
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=min(self._connect_timeout_s, timeout_s))
        sent = io.BytesIO(body) if body is not None and len(body) > _IN_PIECES_BYTES else body
        try:
            async with self._open().request(
                method, url, data=sent, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await _read_bounded(response)
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise Unreachable(f"no connection: {_words(error)}") from error
        except TimeoutError as error:
            raise BackendError(f"no complete reply within {timeout_s:g} s", retryable=False) from error
        except aiohttp.ClientError as error:
            raise BackendError(f"the connection broke off: {_words(error)}") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding", "User-Agent"),
            )
        return self._session

    async def close(self) -> None:
        """Drop every connection; idempotent. The next request opens a new session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine's address with the way to it.

    Attributes:
        address: In normal form, see `normalise_address`.
        call_timeout_s: Bound on one model call, from sending to the last byte.
        probe_timeout_s: Bound on a probe or health check.
        api_key: Sent as bearer token; shown nowhere.
    """

    http: EngineHttp
    address: str
    call_timeout_s: float
    probe_timeout_s: float
    api_key: str | None = field(default=None, repr=False)

    async def get(self, path: str) -> tuple[int, bytes]:
        """GET within the probe timeout; see `EngineHttp.request`."""
        return await self.http.request(
            "GET", self.address + path, headers=self._headers(), body=None, timeout_s=self.probe_timeout_s
        )

    async def post_json(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST a JSON object within the call timeout and return the one that is answered.

        Raises:
            ContradictoryReply: A 200 that is no JSON object.
            BackendError: As `EngineHttp.request`, and for every other status.
        """
        headers = {**self._headers(), "Content-Type": "application/json"}
        status, reply = await self.http.request(
            "POST", self.address + path, headers=headers, body=orjson.dumps(body), timeout_s=self.call_timeout_s
        )
        if status != 200:
            raise refusal(status, reply)
        return json_object(reply)

    def _headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


def json_object(reply: bytes) -> dict[str, Any]:
    """Parse a reply strictly: NaN, Infinity and numbers beyond a double are no JSON.

    Raises:
        ContradictoryReply: It is no JSON object.
    """
    try:
        parsed = orjson.loads(reply)
    except orjson.JSONDecodeError as error:
        raise ContradictoryReply(f"the reply is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ContradictoryReply("the reply is not a JSON object")
    return parsed


def refusal(status: int, reply: bytes) -> BackendError:
    """Name an error status with what the engine says about it; a client error is not worth a second try."""
    said = reply[:_QUOTED_CHARS].decode("utf-8", "replace").strip()
    retryable = status >= 500 or status in _TRANSIENT_STATUSES
    return BackendError(f"HTTP {status}{f': {said}' if said else ''}", retryable=retryable)


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    if response.content_length is not None:
        if response.content_length > MAX_REPLY_BYTES:
            raise BackendError(f"the reply is larger than {MAX_REPLY_BYTES} bytes", retryable=False)
        return await response.read()
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > MAX_REPLY_BYTES:
            raise BackendError(f"the reply is larger than {MAX_REPLY_BYTES} bytes", retryable=False)
        chunks.append(chunk)
    return b"".join(chunks)


def _words(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        return error.strerror or str(error)  # the whole text speaks of TLS also where there is none
    return str(error) or type(error).__name__
