"""A job's events as server-sent events: replayed from where the client left off, then live, kept alive by comments."""

import asyncio
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prorl_gym.pipeline.events import Event, EventLog
from prorl_gym.server.json_body import encode_json

HEARTBEAT_S = 15.0
"""Below the idle limits of common proxies, which are 60 s."""


class EventStream(Response):
    """Streams until the job's last event, or until the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: EventLog, after: int) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that leaves ends it."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sender = asyncio.create_task(self._send_events(send))
        others = (asyncio.create_task(until_gone(receive)), asyncio.create_task(_beat(send)))
        try:
            await asyncio.wait((sender, *others), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(sender, *others)
        if not sender.cancelled():
            sender.result()

    async def _send_events(self, send: Send) -> None:
        async for event in self._events.follow(self._after):
            await send({"type": "http.response.body", "body": _encoded(event), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(receive: Receive) -> None:
    """Return once the client has closed its connection; the request's body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _beat(send: Send) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await send({"type": "http.response.body", "body": b": still here\n\n", "more_body": True})


def _encoded(event: Event) -> bytes:
    body = encode_json({**event.fields, "seq": event.seq, "event": event.name, "at": event.at})
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.seq, _one_line(event.name), body)


def _one_line(name: str) -> bytes:
    """A handler's event name cannot break the framing."""
    return "".join(character for character in name if character.isprintable()).encode(errors="replace")
