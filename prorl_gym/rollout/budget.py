"""What one episode may still ask of its context, computed before each call: no request is ever refused for it."""

from dataclasses import dataclass

from prorl_gym.config.models import SamplingDefaults
from prorl_gym.tokens.records import GenerateParams
from prorl_gym.types import SamplingParams

CHARACTERS_PER_TOKEN = 64
"""More than any text has on average; of a prompt with more it is known, unrendered, that it fits no context."""


@dataclass(frozen=True, slots=True)
class ContextBudget:
    """Tokens per call and per context.

    Attributes:
        max_tokens: Sampled tokens per call at most.
        max_model_len: Prompt and sampled tokens together; None is no limit that anybody told us of.
    """

    max_tokens: int
    max_model_len: int | None

    def room(self, prompt_tokens: int) -> int:
        """Tokens that the next call may sample; 0 when the context is exhausted."""
        if self.max_model_len is None:
            return self.max_tokens
        return max(0, min(self.max_tokens, self.max_model_len - prompt_tokens))

    def may_hold(self, characters: int) -> bool:
        """False where a prompt with so many characters is too long however it is tokenized."""
        return self.max_model_len is None or characters <= self.max_model_len * CHARACTERS_PER_TOKEN


def context_budget(asked: SamplingParams, defaults: SamplingDefaults, engine_len: int | None) -> ContextBudget:
    """The smallest of what the request, the service and the engine allow."""
    lengths = [n for n in (asked.max_model_len or defaults.max_model_len, engine_len) if n is not None]
    return ContextBudget(asked.max_tokens or defaults.max_tokens, min(lengths) if lengths else None)


def generate_params(
    asked: SamplingParams, defaults: SamplingDefaults, *, max_tokens: int, stop_token_ids: tuple[int, ...]
) -> GenerateParams:
    """How to sample one call: the request's word, else the service's."""
    return GenerateParams(
        max_tokens=max_tokens,
        temperature=defaults.temperature if asked.temperature is None else asked.temperature,
        top_p=defaults.top_p if asked.top_p is None else asked.top_p,
        top_k=defaults.top_k if asked.top_k is None else asked.top_k,
        min_p=defaults.min_p if asked.min_p is None else asked.min_p,
        stop=asked.stop or (),
        stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *(asked.stop_token_ids or ())))),
        seed=asked.seed,
    )
