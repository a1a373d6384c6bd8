"""Server-sent events of one job, resumed where a broken connection left off."""

import asyncio
from collections.abc import AsyncIterator

import httpx
from pydantic import ValidationError

from prorl_gym.client.connection import Connection
from prorl_gym.client.replies import JobEvent
from prorl_gym.errors import ServiceError, ServiceUnreachable

_IDLE_S = 60.0
"""The service sends a sign of life every 15 s."""

_RECONNECTS = 10
_DELAY_S = 0.5


async def follow(connection: Connection, path: str, after: int) -> AsyncIterator[JobEvent]:
    """Yield events up to the final status.

    Raises:
        RequestError: Refused, an unknown job say.
        ServiceUnreachable: The stream broke off, and could not be resumed.
    """
    failures = 0
    while True:
        try:
            headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity", "Last-Event-ID": str(after)}
            async with connection.stream(path, headers=headers, idle_s=_IDLE_S) as response:
                async for event in _events(response):
                    failures, after = 0, event.seq
                    yield event
                    if event.last:
                        return
            raise ServiceUnreachable(f"{path} ended before the job's final status")
        except ServiceUnreachable:
            failures += 1
            if failures > _RECONNECTS:
                raise
            await asyncio.sleep(_DELAY_S)


async def _events(response: httpx.Response) -> AsyncIterator[JobEvent]:
    """Source: HTML standard, section 9.2.6; `data` carries all that the other fields do."""
    fields: list[bytes] = []
    async for line in _lines(response):
        if line.startswith(b"data:"):
            fields.append(line[5:])
        elif not line and fields:
            try:
                event = JobEvent.model_validate_json(b"\n".join(fields))
            except ValidationError as error:
                raise ServiceError(f"an event is not what was asked for: {error}") from error
            fields.clear()
            yield event


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Whole lines; unlike `str.splitlines`, not broken at U+2028 and its like, which JSON may hold."""
    rest = b""
    async for chunk in response.aiter_raw():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
