"""A search service that answers in JSON, at an address that the configuration names."""

from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from prorl_gym.tools.web.captcha import asks_for_human
from prorl_gym.tools.web.failure import FailureKind, WebFailure, seconds_asked

MAX_REPLY_BYTES = 8 << 20
CONNECT_TIMEOUT_S = 5.0
_RATE_LIMITED = 429


class JsonService:
    """Asks the service; follows no redirect, so that a key goes to the configured address alone.

    Args:
        name: For messages.
        headers: Sent with each request.
    """

    def __init__(self, name: str, address: str, headers: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.address = address.rstrip("/")
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the session; a second call is harmless."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Accept": "application/json", **self._headers},
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )

    async def stop(self) -> None:
        """Close it; idempotent."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def ask(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        """The object that the service answers with.

        Raises:
            WebFailure: It gave none, or none with status 200.
        """
        status, headers, body = await self.exchange(method, path, **request)
        if asks_for_human(status, headers, body):
            raise WebFailure(f"{self.name} asks for proof of a human (captcha).", "captcha")
        if status == _RATE_LIMITED:
            wait_s = seconds_asked(headers.get("retry-after", ""))
            raise WebFailure(
                f"{self.name} limits the rate of searches (status 429).", "rate_limit", retry_after_s=wait_s
            )
        if status != 200:
            said = f"{self.name} answered with status {status}."
            raise WebFailure(said, "provider", retry_after_s=0.0 if status >= 500 else None)
        try:
            reply = orjson.loads(body)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            kind: FailureKind = "captcha" if asks_for_human(status, headers, body, text="") else "provider"
            what = "a captcha page" if kind == "captcha" else "something that is not a JSON object"
            raise WebFailure(f"{self.name} answered with {what}.", kind)
        return reply

    async def exchange(self, method: str, path: str, **request: Any) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (names in lower case) and body, whatever they are.

        Raises:
            WebFailure: There was no whole answer.
        """
        if self._session is None:
            raise WebFailure(f"{self.name} is not started.", "provider")
        try:
            async with self._session.request(method, self.address + path, allow_redirects=False, **request) as response:
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MAX_REPLY_BYTES:
                        raise WebFailure(f"{self.name} answered with more than {MAX_REPLY_BYTES} bytes.", "provider")
                return response.status, {str(k).lower(): str(v) for k, v in response.headers.items()}, bytes(body)
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
            raise WebFailure(f"{self.name} cannot be reached.", "unreachable", retry_after_s=0.0) from error


def text_of(found: Mapping[str, Any], key: str) -> str:
    """A field of a result as a text; empty when it is missing or no text."""
    value = found.get(key)
    return value if isinstance(value, str) else ""
