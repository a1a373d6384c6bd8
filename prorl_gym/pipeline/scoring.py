"""From what a handler's EVAL returned to a score that may train a policy."""

import math
from collections.abc import Mapping
from numbers import Real

from prorl_gym.errors import EvaluationError, HandlerError
from prorl_gym.handlers.base import EvalOutput
from prorl_gym.pipeline.outcome import Score


def score_of(verdict: object) -> Score:
    """The checked score of a verdict.

    Raises:
        HandlerError: Not an EvalOutput, or a field of it has a wrong type.
        EvaluationError: The reward is not finite.
    """
    if not isinstance(verdict, EvalOutput):
        raise HandlerError(f"eval returned {type(verdict).__name__}, not EvalOutput", stage="eval")
    if not isinstance(verdict.components, Mapping):
        raise HandlerError(f"components must be a mapping, not {type(verdict.components).__name__}", stage="eval")
    reward = _finite(verdict.reward)
    return Score(
        reward=reward,
        resolved=None if verdict.resolved is None else bool(verdict.resolved),
        components=verdict.components,
        masked=bool(verdict.masked) or reward is None,
    )


def _finite(reward: object) -> float | None:
    if reward is None:
        return None
    if not isinstance(reward, Real):
        raise HandlerError(f"reward must be a number or None, not {type(reward).__name__}", stage="eval")
    number = float(reward)
    if not math.isfinite(number):
        raise EvaluationError(f"the reward is {number}, which is no measurement", stage="eval")
    return number
