r"""Math problems with a known answer: reward 1 when the last `\boxed{...}` equals it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from prorl_gym.errors import RequestError
from prorl_gym.resources.base import EpisodeOutcome, ResourcesContext, ResourcesServer, Verdict
from prorl_gym.resources.graders import WorkerLost


class MathConfig(BaseModel):
    """Own fields of the `math` resources server."""

    workers: int | None = Field(None, ge=1)
    """Grader processes; null is one per usable CPU."""
    timeout_s: float = Field(20.0, gt=0, allow_inf_nan=False)
    """One comparison; an answer that takes longer scores 0."""
    memory_mb: int = Field(2048, ge=512)
    """Address space of one grader process."""


class MathServer(ResourcesServer):
    """Stateless: a verdict depends on the row and the answer alone."""

    def __init__(self, context: ResourcesContext) -> None:
        super().__init__(context)
        config = MathConfig.model_validate(dict(context.config))
        self._graders = context.graders(
            Path(__file__).with_name("grader.py"),
            workers=config.workers,
            timeout_s=config.timeout_s,
            memory_bytes=config.memory_mb << 20,
        )

    async def start(self) -> None:
        """Start the first grader."""
        await self._graders.start()

    async def stop(self) -> None:
        """Kill the graders."""
        await self._graders.stop()

    def check_row(self, row: Mapping[str, Any]) -> None:
        """A row needs an expected answer."""
        expected_answer(row)

    async def verify(self, session_id: str, row: Mapping[str, Any], outcome: EpisodeOutcome) -> Verdict:
        """Compare in a grader process; an answer that no grader can look at within its bounds is wrong."""
        expected = expected_answer(row)
        try:
            graded = await self._graders.grade({"answer": outcome.answer, "expected": expected})
        except WorkerLost as error:
            await self._graders.grade({"answer": None, "expected": expected})
            return Verdict(0.0, resolved=False, components={"correct": 0.0, "detail": {f"eval_{error.cause}": True}})
        correct = bool(graded["correct"])
        components = {"correct": float(correct), "detail": {"extracted": graded["extracted"]}}
        return Verdict(float(correct), resolved=correct, components=components)


def expected_answer(row: Mapping[str, Any]) -> str:
    """`expected_answer`, else veRL's `reward_model.ground_truth`.

    Raises:
        RequestError: Neither is there, or it is no text and no number.
    """
    field, value = "expected_answer", row.get("expected_answer")
    if value is None and isinstance(row.get("reward_model"), Mapping):
        field, value = "reward_model.ground_truth", row["reward_model"].get("ground_truth")
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = repr(value)
    if not isinstance(value, str) or not value.strip():
        raise RequestError(
            "a math row needs `expected_answer` (or `reward_model.ground_truth`): a non-empty text or a number",
            field=f"instance.{field}",
        )
    return value
