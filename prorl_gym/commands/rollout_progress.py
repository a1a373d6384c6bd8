"""What a person sees while rollouts are made: a bar on a terminal, a plain line now and then elsewhere."""

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from prorl_gym.commands.rollout_table import RolloutFacts
from prorl_gym.types import ServerStatus

_PLAIN_EVERY_S = 5.0


@dataclass(slots=True)
class Tally:
    """Counts so far.

    Attributes:
        total: Rollouts asked for.
        finished: Results written, masked ones too, and those kept from an earlier run.
        masked: Results whose reward is no measurement.
        refused: Message → how many requests were refused with it; they have no result.
    """

    total: int
    finished: int = 0
    masked: int = 0
    reward_sum: float = 0.0
    rewards: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def add(self, facts: RolloutFacts) -> None:
        """Count one result."""
        self.finished += 1
        if facts.reward is None:
            self.masked += 1
        else:
            self.rewards += 1
            self.reward_sum += facts.reward

    def refuse(self, reason: str) -> None:
        """Count one request that was refused."""
        self.refused[reason] = self.refused.get(reason, 0) + 1

    @property
    def failures(self) -> int:
        """Rollouts that measured nothing."""
        return self.masked + sum(self.refused.values())


class ProgressView:
    """A context manager; `show` may be called as often as one likes."""

    def __init__(self, console: Console, tally: Tally) -> None:
        self._console = console
        self._tally = tally
        self._began = time.monotonic()
        self._said_at = self._began
        self._said: tuple[int, int] | None = None
        columns = (
            TextColumn("rollouts"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )  # fmt: skip
        # Refreshed by `show` only: a thread of its own would be one more thing to stop.
        self._bar = Progress(*columns, console=console, auto_refresh=False) if console.is_terminal else None
        self._row = self._bar.add_task("", total=tally.total) if self._bar else None

    def show(self, status: ServerStatus | None) -> None:
        """Show the tally and, where known, what each stage does."""
        words = " · ".join(filter(None, (_occupancy(status), self._outcome())))
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, completed=self._tally.finished, description=words)
            self._bar.refresh()
            return
        now = time.monotonic()
        state = (self._tally.finished, self._tally.failures)
        if now - self._said_at >= _PLAIN_EVERY_S and state != self._said:
            self._say(words)

    def __enter__(self) -> Self:
        """Draw the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the last state standing."""
        if self._bar is not None:
            self.show(None)
            self._bar.stop()
        else:
            self._say(self._outcome())

    def _say(self, words: str) -> None:
        self._said_at = time.monotonic()
        self._said = (self._tally.finished, self._tally.failures)
        elapsed = self._said_at - self._began
        line = f"{self._tally.finished}/{self._tally.total} rollouts, {elapsed:.0f} s · {words}".removesuffix(" · ")
        self._console.print(line, soft_wrap=True, highlight=False)

    def _outcome(self) -> str:
        parts = []
        if self._tally.rewards:
            parts.append(f"reward {self._tally.reward_sum / self._tally.rewards:.2f}")
        if self._tally.failures:
            parts.append(f"failed {self._tally.failures}")
        return " · ".join(parts)


def _occupancy(status: ServerStatus | None) -> str:
    """Jobs inside each stage, and waiting for it."""
    if status is None:
        return ""
    stages = (
        ("INIT", status.active_init, status.init_queue),
        ("RUN", status.active_run, status.run_queue),
        ("EVAL", status.active_eval, status.eval_queue),
    )
    return " · ".join(f"{name} {active}" + (f"+{waiting}" if waiting else "") for name, active, waiting in stages)
