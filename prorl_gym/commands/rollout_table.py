"""What is kept of a result once it is on disk, and tables of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from rich.table import Table

from prorl_gym.types import JobResult

STAGES = ("init", "run", "eval")
_QUESTION_COLUMNS = ("question", "problem", "problem_statement", "prompt")
_QUESTION_CHARACTERS = 44


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """One result without its tokens.

    Attributes:
        task: Its task.
        reward: None when there is no measurement.
        resolved: The task's own pass criterion, or None.
        turns: Model calls that became part of the trajectory.
        sampled_tokens: Tokens that the model sampled.
        ending: Stop reason, else status.
        failure: What broke, in words, or None.
        seconds: Active seconds of init, run and eval.
    """

    task: str
    reward: float | None
    resolved: bool | None
    turns: int
    sampled_tokens: int
    ending: str
    failure: str | None
    seconds: tuple[float, float, float]

    @classmethod
    def of(cls, result: JobResult) -> Self:
        """The facts of one result."""
        measured = not result.mask_sample
        init_s, run_s, eval_s = (result.timing.active.get(stage, 0.0) for stage in STAGES)
        return cls(
            task=result.task,
            reward=result.reward if measured else None,
            resolved=result.resolved if measured else None,
            turns=sum(segment.num_turns for segment in result.segments),
            sampled_tokens=sum(sum(segment.response_mask) for segment in result.segments),
            ending=result.stop_reason or result.status,
            failure=f"{result.failure.kind}: {result.failure.message}" if result.failure else None,
            seconds=(init_s, run_s, eval_s),
        )


def summary_table(results: Iterable[RolloutFacts]) -> Table:
    """One row per task: counts and means; what measured nothing counts as failed and in no mean."""
    by_task: dict[str, list[RolloutFacts]] = {}
    for facts in results:
        by_task.setdefault(facts.task, []).append(facts)
    table = Table("task", box=None)
    for heading in ("rollouts", "failed", "reward", "resolved", "turns", "sampled tokens", "init s", "run s", "eval s"):
        table.add_column(heading, justify="right")
    for task, group in sorted(by_task.items()):
        measured = [facts for facts in group if facts.reward is not None]
        table.add_row(
            task,
            str(len(group)),
            str(len(group) - len(measured)),
            _mean([facts.reward for facts in measured if facts.reward is not None], 3),
            _mean([float(facts.resolved) for facts in measured if facts.resolved is not None], 3),
            _mean([facts.turns for facts in measured], 1),
            _mean([facts.sampled_tokens for facts in measured], 0),
            *(_mean([facts.seconds[stage] for facts in measured], 2) for stage in range(len(STAGES))),
        )
    return table


def rollout_table(results: Sequence[tuple[Mapping[str, object], RolloutFacts]]) -> Table:
    """One row per rollout: what was asked, and how it went."""
    table = Table("task", "question", box=None)
    for heading in ("turns", "sampled tokens", "reward"):
        table.add_column(heading, justify="right")
    table.add_column("stop reason")
    for stage in STAGES:
        table.add_column(f"{stage} s", justify="right")
    for row, facts in results:
        table.add_row(
            facts.task,
            _question(row),
            str(facts.turns),
            str(facts.sampled_tokens),
            "none" if facts.reward is None else f"{facts.reward:g}",
            facts.ending,
            *(f"{seconds:.2f}" for seconds in facts.seconds),
        )
    return table


def _question(row: Mapping[str, object]) -> str:
    text = next((value for name in _QUESTION_COLUMNS if isinstance(value := row.get(name), str)), "")
    text = " ".join(text.split())
    return text if len(text) <= _QUESTION_CHARACTERS else text[: _QUESTION_CHARACTERS - 1] + "…"


def _mean(values: Sequence[float], digits: int) -> str:
    return f"{fmean(values):.{digits}f}" if values else "-"
