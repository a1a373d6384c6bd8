"""The jobs that a pipeline knows: those under way, and for a while those that have ended.

The invariant: a job under way is never dropped, and holding its ticket here is what keeps it alive. A durable store can
take this class's place.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from prorl_gym.pipeline.ticket import Ticket


class _Ended(NamedTuple):
    at: float
    size_bytes: int


class TicketStore:
    """Tickets by id, prefix and group.

    Args:
        ttl_s: How long an ended job stays.
        max_count: How many ended jobs stay; the oldest goes first.
        max_bytes: How much memory ended jobs may keep together; the oldest goes first, the newest stays in any case.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, ttl_s: float, max_count: int, max_bytes: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ttl = ttl_s
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._clock = clock
        self._tickets: dict[str, Ticket] = {}
        self._groups: dict[str, dict[str, None]] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._ended_bytes = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """Keep a new job."""
        self._tickets[ticket.id] = ticket
        if ticket.request.group_id is not None:
            self._groups.setdefault(ticket.request.group_id, {})[ticket.id] = None

    def get(self, job_id: str) -> Ticket | None:
        """The job of that id."""
        self.expire()
        return self._tickets.get(job_id)

    def ended(self, ticket: Ticket, size_bytes: int) -> None:
        """Let a job's time begin to run; `size_bytes` is what keeping it costs."""
        self._ended[ticket.id] = _Ended(self._clock(), size_bytes)
        self._ended_bytes += size_bytes
        self.expire()

    def under_way(self) -> list[Ticket]:
        """Every job without an outcome."""
        return [ticket for ticket in self._tickets.values() if ticket.outcome is None]

    def with_prefix(self, prefix: str) -> list[str]:
        """Ids that begin with `prefix`."""
        self.expire()
        return [job_id for job_id in self._tickets if job_id.startswith(prefix)]

    def in_group(self, group_id: str) -> list[str]:
        """Ids of one group."""
        self.expire()
        return list(self._groups.get(group_id, ()))

    def expire(self) -> None:
        """Drop what is too old or too much."""
        limit = self._clock() - self._ttl
        while self._ended:
            job_id, oldest = next(iter(self._ended.items()))
            if oldest.at > limit and not self._too_much():
                return
            del self._ended[job_id]
            self._ended_bytes -= oldest.size_bytes
            self._drop(self._tickets.pop(job_id))

    def _too_much(self) -> bool:
        count = len(self._ended)
        return count > self._max_count or (self._ended_bytes > self._max_bytes and count > 1)

    def _drop(self, ticket: Ticket) -> None:
        group_id = ticket.request.group_id
        if group_id is not None:
            members = self._groups[group_id]
            del members[ticket.id]
            if not members:
                del self._groups[group_id]
