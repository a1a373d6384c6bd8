"""One generation in flight: what was asked, what was sampled so far, and how it ended.

Invariant: `len(output_ids) == len(logprobs) == len(top_logprobs)`; sampled ids are never changed or removed, a sampled
stop token included.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]

#: vLLM's bound (`_SAMPLING_EPS`): a temperature below it means greedy.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one sequence.

    `top_k` 0, `top_p` 1.0 and `min_p` 0.0 mean off; `seed` None means unseeded. `top_logprobs` is the number of
    alternatives to report per token, 0 for none.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    top_logprobs: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def truncates(self) -> bool:
        """Whether part of the vocabulary is cut off before sampling (never for greedy, as in vLLM)."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt with its growing continuation. Owned by the engine thread from submit until `on_done` is called.

    `on_done` is called exactly once, on the engine thread, when `finish_reason` is set.
    """

    prompt_ids: list[int]
    params: SamplingParams
    on_done: Callable[[Sequence], None]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    text: str | None = None  # set by stop-string detection only: the text up to the stop string
    cached_tokens: int = 0
    slot: int | None = None
    computed: int = 0  # tokens of prompt + output whose keys and values are in the slot
    submitted_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.params.seed)  # noqa: S311 - sampling, not secrecy

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens together."""
        return len(self.prompt_ids) + len(self.output_ids)

    def pending(self, limit: int) -> list[int]:
        """The next tokens to run through the model, at most `limit`."""
        start = self.computed - len(self.prompt_ids)
        if start >= 0:
            return self.output_ids[start : start + limit]
        return (self.prompt_ids[self.computed : self.computed + limit] + self.output_ids)[:limit]

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Mark as ended; the engine reports it."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
