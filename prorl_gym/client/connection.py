"""HTTP to one rollout service: typed errors, and retries that can do no harm.

Everything the service offers may be asked twice: jobs carry ids that their client chose, and the control calls say what
should be, not what should change. So a call that broke off is repeated, within a bound; a refusal is raised at once.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from prorl_gym import errors
from prorl_gym.client.lanes import Lanes
from prorl_gym.errors import ConfigError, QueueFull, RequestError, ServiceError, ServiceUnreachable

T = TypeVar("T")

_CONNECT_S = 10.0
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
_GATEWAY_STATUSES = frozenset({502, 503, 504})
_QUOTED_CHARS = 300


class Connection:
    """Any number of calls at once to one service.

    Args:
        address: `http://HOST:PORT`.
        token: Bearer token, or None.
        retry_for_s: How long a call that got no answer, or found the queue full, is repeated. 0 never repeats.
        compress: Accept gzip for results.

    Raises:
        ConfigError: The address is none.
    """

    def __init__(self, address: str, *, token: str | None, retry_for_s: float, compress: bool) -> None:
        if not address.startswith(("http://", "https://")):
            raise ConfigError(f"the service's address is http://HOST:PORT, not {address!r}")
        headers = {"Accept-Encoding": "gzip" if compress else "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self.address = address
        self._retry_for_s = retry_for_s
        self._http = httpx.AsyncClient(
            base_url=address,
            headers=headers,
            transport=Lanes(tls=address.startswith("https://")),
            trust_env=False,
            follow_redirects=False,
        )

    async def close(self) -> None:
        """Drop every connection; idempotent."""
        await self._http.aclose()

    async def call(
        self,
        method: str,
        path: str,
        reply: TypeAdapter[T],
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        timeout_s: float | None = 60.0,
        retry_for_s: float | None = None,
    ) -> T:
        """Make one call and parse its answer.

        Args:
            method: HTTP method.
            path: Path, quoted.
            reply: What a success looks like.
            body: JSON object to send, if any; numpy values are sent as plain ones.
            query: Query parameters.
            timeout_s: How long the answer may take; None waits as long as the connection stands.
            retry_for_s: Other than the connection's own.

        Raises:
            RequestError: Refused; the subclass that the service named.
            ServiceUnreachable: No answer, also not after the retries.
            ServiceError: An answer that is none of ours, or an internal error.
        """
        content = None if body is None else encode(body)
        headers = None if body is None else {"Content-Type": "application/json"}
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S, pool=None)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + (self._retry_for_s if retry_for_s is None else retry_for_s)
        delay_s = _FIRST_DELAY_S
        while True:
            failure: ServiceUnreachable | QueueFull
            try:
                response = await self._http.request(
                    method, path, content=content, headers=headers, params=query, timeout=timeout
                )
                return _parsed(response, reply)
            except httpx.HTTPError as error:
                failure = ServiceUnreachable(f"{method} {self.address}{path}: {str(error) or type(error).__name__}")
            except (ServiceUnreachable, QueueFull) as error:
                failure = error
            pause_s = max(delay_s, (failure.retry_after_s or 0.0) if isinstance(failure, QueueFull) else 0.0)
            if loop.time() + pause_s > give_up_at:
                raise failure
            await asyncio.sleep(pause_s)
            delay_s = min(_MAX_DELAY_S, 2 * delay_s)

    @asynccontextmanager
    async def stream(self, path: str, *, headers: Mapping[str, str], idle_s: float) -> AsyncIterator[httpx.Response]:
        """GET a stream; `idle_s` without a byte ends it.

        Raises:
            RequestError: Refused.
            ServiceUnreachable: No connection, or it broke off.
        """
        timeout = httpx.Timeout(idle_s, connect=_CONNECT_S, pool=None)
        try:
            async with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _failure(response)
                yield response
        except httpx.HTTPError as error:
            message = f"GET {self.address}{path}: {str(error) or type(error).__name__}"
            raise ServiceUnreachable(message) from error


def encode(body: Mapping[str, Any]) -> bytes:
    """JSON that every server reads: lone surrogates escaped, numpy values plain.

    Raises:
        RequestError: It holds NaN, an infinity, or an object that JSON has no form for.
    """
    try:
        return json.dumps(body, default=_plain, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {error}") from error


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _parsed(response: httpx.Response, reply: TypeAdapter[T]) -> T:
    if response.status_code >= 300:
        raise _failure(response)
    try:
        return reply.validate_json(response.content)
    except ValidationError as error:
        raise ServiceError(f"the reply to {response.request.url.path} is not what was asked for: {error}") from error


def _failure(response: httpx.Response) -> RequestError | ServiceError:
    """The error that an answer stands for."""
    status = response.status_code
    try:
        detail = response.json()["error"]
        kind, message, field = str(detail["type"]), str(detail["message"]), detail.get("field")
    except (ValueError, KeyError, TypeError, AttributeError):
        said = f"HTTP {status}: {response.text[:_QUOTED_CHARS]}"
        return ServiceUnreachable(said) if status in _GATEWAY_STATUSES else ServiceError(said)
    if status >= 500 and kind != "NotRunning":
        return ServiceError(f"HTTP {status}: {kind}: {message}")
    named = getattr(errors, kind, None)
    if isinstance(named, type) and issubclass(named, RequestError):
        return named(message, field=field, retry_after_s=_retry_after_s(response))
    return RequestError(f"{kind}: {message}", field=field)


def _retry_after_s(response: httpx.Response) -> float | None:
    try:
        return float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return None
