"""Where a job's seconds went."""

import time
from collections.abc import Callable

from prorl_gym.errors import Stage
from prorl_gym.pipeline.timer import PausableTimer
from prorl_gym.types import Timing


class StageTimes:
    """Queued and in-slot seconds per stage; readable at any moment, also in the middle of a stage."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self._queued: dict[str, float] = {}
        self._took: dict[str, float] = {}
        self._current: tuple[dict[str, float], Stage, float] | None = None

    def queue(self, stage: Stage) -> None:
        """The job begins to wait for a stage."""
        self._turn_to(self._queued, stage)

    def enter(self, stage: Stage) -> None:
        """It has a slot."""
        self._turn_to(self._took, stage)

    def leave(self) -> None:
        """It waits for nothing and has no slot."""
        self._settle()
        self._current = None

    def timing(self, timer: PausableTimer, *, timed_out: bool) -> Timing:
        """Everything until now."""
        self._settle()
        took = self._took
        return Timing(
            init_time=took.get("init", 0.0),
            run_time=took.get("run", 0.0),
            eval_time=took.get("eval", 0.0),
            others_time=max(0.0, self._clock() - self._begun - sum(took.values())),
            counted_elapsed=timer.elapsed_s,
            timeout_triggered=timed_out,
            queued=self._queued.copy(),
            active=timer.active(),
        )

    def _turn_to(self, account: dict[str, float], stage: Stage) -> None:
        self._settle()
        self._current = (account, stage, self._clock())

    def _settle(self) -> None:
        if self._current is not None:
            account, stage, since = self._current
            now = self._clock()
            account[stage] = account.get(stage, 0.0) + now - since
            self._current = (account, stage, now)
