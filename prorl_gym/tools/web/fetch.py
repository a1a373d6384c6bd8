"""Fetching one page, bounded in time, size and redirects.

The invariant: the address comes from a model, so every connection goes through the guard, nothing of this host's
(proxy, cookies, credentials) goes along, and what comes back is bytes that nobody has parsed yet.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from prorl_gym.tools.web.captcha import asks_for_human
from prorl_gym.tools.web.failure import FailureKind, WebFailure, seconds_asked
from prorl_gym.tools.web.guard import ConnectRule, Refused, SystemResolver, guarded_connector

HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; prorl-gym)",
    "Accept": "text/html,application/xhtml+xml,text/plain,application/json;q=0.9,*/*;q=0.5",
    "Accept-Language": "en, *;q=0.5",
    "Accept-Encoding": "gzip, deflate",
}
MAX_ADDRESS_CHARACTERS = 4096
CONNECT_TIMEOUT_S = 10.0
_CHUNK_BYTES = 64 << 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_RATE_LIMITED = 429
_PASSING = frozenset({500, 502, 503, 504})
_CERTIFICATE = (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError)
_BROKEN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError, RuntimeError)
_FOREIGN: tuple[tuple[tuple[type[Exception], ...], str, FailureKind, float | None], ...] = (
    ((aiohttp.InvalidURL,), "is no host's name or address", "bad_address", None),
    ((TimeoutError,), "did not answer in time", "unreachable", 0.0),
    ((aiohttp.ClientConnectorDNSError,), "does not exist, or its name cannot be resolved", "unreachable", None),
    (_CERTIFICATE, "has no valid certificate, or speaks no TLS", "unreachable", None),
    (_BROKEN, "cannot be reached, or broke the connection off", "unreachable", 0.0),
)
"""The libraries' errors, the first that fits counts: what the model is told, and whether another attempt may help."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a server sent for a page.

    Attributes:
        url: Where it was found in the end.
        body: Decompressed, at most the fetcher's `max_bytes`.
        content_type: Lower case, without parameters; empty when the server did not say.
        charset: As the server claims.
        cut: There was more.
        headers: Of the answer, names in lower case.
    """

    url: str
    body: bytes
    content_type: str
    charset: str | None
    cut: bool
    headers: Mapping[str, str]


class PageFetcher:
    """Fetches pages over connections that `rule` allows. Use it as an async context.

    Args:
        limit: Connections at once.
        resolver: None is the host's own.
    """

    def __init__(
        self,
        rule: ConnectRule,
        *,
        max_bytes: int,
        max_redirects: int,
        limit: int,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._rule = rule
        self._max_bytes = max_bytes
        self._max_redirects = max_redirects
        self._limit = limit
        self._resolver = resolver or SystemResolver()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the connector; no connection is made yet."""
        self._session = aiohttp.ClientSession(
            connector=guarded_connector(self._rule, self._resolver, limit=self._limit),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
            headers=HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            max_line_size=16 << 10,
            max_field_size=16 << 10,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def fetch(self, address: str) -> Page:
        """The page at an address that a model wrote. The caller bounds the time.

        Raises:
            WebFailure: Says why there is none.
        """
        url = page_address(address)
        for _ in range(self._max_redirects + 1):
            found = await self._ask(url)
            if isinstance(found, Page):
                return found
            url = found
        raise WebFailure(f"{address} redirects more than {self._max_redirects} times.", "http")

    async def _ask(self, url: URL) -> Page | URL:
        """The page, or where it is instead."""
        if self._session is None:
            raise WebFailure("Pages are no longer fetched.", "unreachable")
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status in _REDIRECTS and (location := response.headers.get("Location")):
                    return _redirect(url, location)
                body, cut = await _read(response, self._max_bytes)
                _refuse_bad_status(response, body)
                return Page(
                    str(url), body, _content_type(response), _charset(response), cut, _lowered(response.headers)
                )
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError, zlib.error) as error:
            raise _classified(error, url) from error


def page_address(address: str) -> URL:
    """A web address as the model wrote it.

    Raises:
        WebFailure: It is none that pages are fetched from.
    """
    text = address.strip()
    if len(text) > MAX_ADDRESS_CHARACTERS:
        raise WebFailure(f"The address is longer than {MAX_ADDRESS_CHARACTERS} characters.", "bad_address")
    try:
        url = URL(text)
        usable = url.scheme in {"http", "https"} and bool(url.host) and url.port is not None
    except ValueError:
        usable = False
    if not usable:
        raise WebFailure(f"{text[:200]!r} is not a full http:// or https:// address.", "bad_address")
    if url.user is not None or url.password is not None:
        raise WebFailure("An address with a user name or a password is not fetched.", "bad_address")
    return url.with_fragment(None)


def _redirect(url: URL, location: str) -> URL:
    try:
        target = url.join(URL(location))
    except ValueError:
        target = None
    if target is None:
        raise WebFailure(f"{url} redirects to something that is no address.", "http")
    return page_address(str(target))


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> tuple[bytes, bool]:
    """The body, decompressed, and whether it was cut; no more is ever held than a chunk beyond `max_bytes`."""
    inflate = _inflater(response.headers.get("Content-Encoding", ""))
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        body += inflate(chunk, max_bytes + 1 - len(body))
        if len(body) > max_bytes:
            return bytes(body[:max_bytes]), True
    return bytes(body), False


def _inflater(encoding: str) -> Callable[[bytes, int], bytes]:
    """Decompresses chunk by chunk, to at most so many bytes each."""
    name = encoding.strip().lower()
    if name in {"", "identity"}:
        return lambda chunk, limit: chunk[:limit]
    if name not in {"gzip", "x-gzip", "deflate"}:
        raise WebFailure(f"The page is compressed in a way that was not asked for ({name[:40]}).", "unreadable")
    inflating: list[Any] = []

    def inflate(chunk: bytes, limit: int) -> bytes:
        if not inflating:
            bare = name == "deflate" and chunk[0] & 0x0F != zlib.DEFLATED
            inflating.append(zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32))
        found: bytes = inflating[-1].decompress(chunk, limit)
        while inflating[-1].eof and len(found) < limit and (rest := inflating[-1].unused_data):
            inflating[-1] = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip may come in several members
            found += inflating[-1].decompress(rest, limit - len(found))
        return found

    return inflate


def _refuse_bad_status(response: aiohttp.ClientResponse, body: bytes) -> None:
    status, wait_s = response.status, seconds_asked(response.headers.get("Retry-After", ""))
    if asks_for_human(status, _lowered(response.headers), body):
        raise WebFailure(f"{response.url.host} asks for proof of a human (captcha); the page was not read.", "captcha")
    if status == _RATE_LIMITED:
        message = f"{response.url.host} limits the rate of requests (status 429); the page was not read."
        raise WebFailure(message, "rate_limit", retry_after_s=wait_s)
    if status in _PASSING:
        message = f"{response.url} answered with status {status}."
        raise WebFailure(message, "http", retry_after_s=wait_s)
    if not 200 <= status < 300:
        raise WebFailure(f"{response.url} answered with status {status} {response.reason or ''}".strip() + ".", "http")


def _content_type(response: aiohttp.ClientResponse) -> str:
    return response.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def _charset(response: aiohttp.ClientResponse) -> str | None:
    try:
        return response.charset
    except (ValueError, LookupError):
        return None


def _lowered(headers: Mapping[str, str]) -> dict[str, str]:
    return {str(name).lower(): str(value) for name, value in headers.items()}


def _classified(error: Exception, url: URL) -> WebFailure:
    """A foreign error as ours; nothing of the inner network's own words gets to the model."""
    refusal = _refusal_in(error)
    if refusal is not None:
        return WebFailure(f"{url.host} is not fetched: {refusal}.", "refused")
    for types, message, kind, wait_s in _FOREIGN:
        if isinstance(error, types):
            return WebFailure(f"{url.host} {message}.", kind, retry_after_s=wait_s)
    return WebFailure(f"{url.host} sent something that is no proper answer.", "http")


def _refusal_in(error: BaseException) -> str | None:
    """The guard's words, wherever the libraries have put them."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, Refused):
            return str(seen)
        inner = getattr(seen, "os_error", None)
        seen = inner if isinstance(inner, BaseException) and inner is not seen else seen.__cause__ or seen.__context__
    return None
