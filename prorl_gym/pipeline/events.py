"""One job's progress, kept for replay and followed live.

The invariant: a reader never holds the writer up and never grows a queue. Everyone reads the same bounded log from
where he stands; who falls behind its start sees a gap in `seq`.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

KEPT_EVENTS = 500


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job.

    Attributes:
        seq: From 1, without gaps at the writer.
        name: `queued`, `init`, `run`, `eval`, `waiting`, `resumed`, the handler's own, and last of all a final status.
        at: Unix time in seconds.
        fields: As the writer gave them; made safe for JSON when sent.
    """

    seq: int
    name: str
    at: float
    fields: Mapping[str, Any]


class EventLog:
    """Append-only, bounded, closed by the job's last event. For the event loop's thread."""

    __slots__ = ("_closed", "_events", "_next", "_readers")

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._next = 1
        self._closed = False
        self._readers: list[asyncio.Future[None]] = []

    @property
    def closed(self) -> bool:
        """True once the last event is in."""
        return self._closed

    def append(self, name: str, fields: Mapping[str, Any] | None = None, *, last: bool = False) -> None:
        """Add an event; after the last one nothing is added any more."""
        if self._closed:
            return
        self._events.append(Event(self._next, name, time.time(), fields or {}))
        self._next += 1
        self._closed = last
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():
                reader.set_result(None)

    def since(self, seq: int = 0) -> list[Event]:
        """The kept events after number `seq`."""
        first = self._next - len(self._events)
        return list(islice(self._events, max(0, seq + 1 - first), None))

    async def follow(self, seq: int = 0) -> AsyncIterator[Event]:
        """Every kept event after number `seq`, then the new ones as they come; ends after the job's last one."""
        while True:
            for event in self.since(seq):
                seq = event.seq
                yield event
            if seq + 1 < self._next:
                continue
            if self._closed:
                return
            reader = asyncio.get_running_loop().create_future()
            self._readers.append(reader)
            try:
                await reader
            finally:
                if reader in self._readers:
                    self._readers.remove(reader)
