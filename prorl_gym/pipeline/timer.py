"""What a job's budgets are counted with.

The invariant: only time in which a stage executes counts. Queueing, teardown and every `job.waiting` are free.
"""

import asyncio
import time
from collections.abc import Callable

from prorl_gym.errors import Stage

Clock = Callable[[], float]


class PausableTimer:
    """A job's budget and those of its stages, monotonic. For the event loop's thread.

    Args:
        budget_s: For all stages together.
        clock: Seconds, monotonic.

    Attributes:
        expired: True once a budget was used up.
    """

    def __init__(self, budget_s: float, *, clock: Clock = time.monotonic) -> None:
        self._allotted = budget_s
        self._budget = budget_s
        self._clock = clock
        self._stage: Stage | None = None
        self._stage_budget: float | None = None
        self._counted: dict[str, float] = {}
        self._elapsed = 0.0
        self._since: float | None = None
        self._entry = 0
        self._pauses = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._on_expiry: Callable[[], None] | None = None
        self.expired = False

    @property
    def elapsed_s(self) -> float:
        """Counted so far, over all stages."""
        self._settle()
        return self._elapsed

    @property
    def remaining_s(self) -> float:
        """Until the stage's budget or the job's is used up, whichever is first."""
        self._settle()
        remaining = self._budget - self._elapsed
        if self._stage_budget is not None and self._stage is not None:
            remaining = min(remaining, self._stage_budget - self._counted[self._stage])
        return remaining

    def active(self) -> dict[str, float]:
        """Counted so far, per stage."""
        self._settle()
        return self._counted.copy()

    def enter(self, stage: Stage, budget_s: float | None, on_expiry: Callable[[], None]) -> None:
        """A stage begins to execute; `on_expiry` is called once on the event loop when a budget is used up."""
        self._entry += 1
        self._pauses = 0
        self._stage = stage
        self._stage_budget = budget_s
        self._counted.setdefault(stage, 0.0)
        self._on_expiry = on_expiry
        self._run()

    def leave(self) -> None:
        """The stage ends; pauses that it left open end with it."""
        self._halt()
        self._entry += 1
        self._stage = None
        self._stage_budget = None
        self._on_expiry = None

    def close(self) -> None:
        """Nothing runs any more: take the alarm out of the loop."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def pause(self) -> int:
        """Stop counting; give the number back to `resume`. Pauses may nest and overlap."""
        self._pauses += 1
        self._halt()
        return self._entry

    def resume(self, entry: int) -> None:
        """Count again once every pause of this stage is over; one of an earlier stage changes nothing."""
        if entry != self._entry:
            return
        self._pauses -= 1
        if self._pauses == 0 and self._stage is not None:
            self._run()

    def renew(self) -> None:
        """Allot the whole budget once more, for the stages to come."""
        self._budget = self.elapsed_s + self._allotted

    def overrun(self) -> str:
        """Which budget is used up, in words."""
        if self._stage_budget is not None and self._budget - self._elapsed > 0:
            return f"its budget of {self._stage_budget:g} s"
        return f"the job's budget of {self._allotted:g} s"

    def _settle(self) -> None:
        if self._since is not None and self._stage is not None:
            now = self._clock()
            passed, self._since = now - self._since, now
            self._elapsed += passed
            self._counted[self._stage] += passed

    def _run(self) -> None:
        self._since = self._clock()
        self._set_alarm()

    def _halt(self) -> None:
        self._settle()
        self._since = None

    def _set_alarm(self) -> None:
        """Have the loop ring when the budgets are used up; an alarm that rings before that is left as it is."""
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, self.remaining_s)
        if self._alarm is not None:
            if self._alarm.when() <= at:
                return
            self._alarm.cancel()
        self._alarm = loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self._since is None:
            return
        if self.remaining_s > 0:  # set for an earlier stage, before a pause, or by a coarser clock than ours
            self._set_alarm()
            return
        self.expired = True
        if self._on_expiry is not None:
            self._on_expiry()


class Pause:
    """One wait that does not count, as `async with`.

    Args:
        on_change: Told `waiting` and `resumed`.
    """

    __slots__ = ("_entry", "_on_change", "_timer")

    def __init__(self, timer: PausableTimer, on_change: Callable[[str], None]) -> None:
        self._timer = timer
        self._on_change = on_change
        self._entry = 0

    async def __aenter__(self) -> None:
        """Stop the timer."""
        self._entry = self._timer.pause()
        self._on_change("waiting")

    async def __aexit__(self, *_: object) -> None:
        """Let it run again."""
        self._timer.resume(self._entry)
        self._on_change("resumed")
