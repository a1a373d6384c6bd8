"""The way into a stage: its slots are the stage's pool, its waiters are the stage's queue.

The invariant: a free slot and a waiter never exist together once a call has returned, and a slot that was given to a
waiter who is cancelled before it could run goes to the next one.
"""

import asyncio
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush


@dataclass(slots=True)
class Allowance:
    """A second bound on one gate: how many that it let through may be on their way at once.

    Whoever is let through holds one of it until `Gate.give_back`.
    """

    limit: int
    taken: int = 0


@dataclass(order=True, slots=True)
class _Waiter:
    rank: tuple[int, int]
    admitted: "asyncio.Future[None]" = field(compare=False)


class Gate:
    """Resizable, first come first served within a priority, higher priority first. For the event loop's thread."""

    def __init__(self, size: int, allowance: Allowance | None = None) -> None:
        self._size = size
        self._allowance = allowance
        self._active = 0
        self._heap: list[_Waiter] = []
        self._waiting = 0
        self._arrivals = 0

    @property
    def size(self) -> int:
        """Slots."""
        return self._size

    @property
    def active(self) -> int:
        """Slots taken; for a while more than `size` after a shrink."""
        return self._active

    @property
    def waiting(self) -> int:
        """Length of the queue."""
        return self._waiting

    @property
    def open(self) -> bool:
        """True when one who comes now gets in at once."""
        return self._waiting == 0 and self._room()

    def resize(self, size: int) -> None:
        """Change the number of slots. Shrinking puts nobody out; slots go as they become free."""
        self._size = size
        self._admit()

    def resize_allowance(self, limit: int) -> None:
        """Change the second bound."""
        if self._allowance is not None:
            self._allowance.limit = limit
            self._admit()

    async def enter(self, priority: int = 0) -> None:
        """Wait for a slot; a cancelled wait leaves nothing taken. Each return needs one `leave`."""
        if self.open:
            self._take()
            return
        waiter = _Waiter((-priority, self._arrivals), asyncio.get_running_loop().create_future())
        self._arrivals += 1
        self._waiting += 1
        heappush(self._heap, waiter)
        self._admit()  # those before it may all be cancelled already, and not have noticed yet
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.cancelled():
                self._forget_one()
            else:  # admitted and cancelled in the same turn of the loop
                self.give_back()
                self.leave()
            raise

    def leave(self) -> None:
        """Free a slot."""
        self._active -= 1
        self._admit()

    def give_back(self) -> None:
        """Return what an admission took of the allowance."""
        if self._allowance is not None:
            self._allowance.taken -= 1
            self._admit()

    def _room(self) -> bool:
        allowance = self._allowance
        return self._active < self._size and (allowance is None or allowance.taken < allowance.limit)

    def _take(self) -> None:
        self._active += 1
        if self._allowance is not None:
            self._allowance.taken += 1

    def _admit(self) -> None:
        while self._heap and self._room():
            waiter = heappop(self._heap)
            if not waiter.admitted.done():
                self._waiting -= 1
                self._take()
                waiter.admitted.set_result(None)

    def _forget_one(self) -> None:
        """Count a waiter out whose future was cancelled; sweep such out of the heap once they are the most of it."""
        self._waiting -= 1
        if len(self._heap) > 2 * self._waiting + 64:
            self._heap = [waiter for waiter in self._heap if not waiter.admitted.done()]
            heapify(self._heap)
