"""vLLM's completions route: token ids in, token ids and logprobs out.

Invariant: a generation leaves here only when its ids, logprobs, usage and spans agree; nothing is padded or repaired.
Source: vllm/entrypoints/openai (0.10 to 0.32), `POST /v1/completions` with `return_token_ids`.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

from prorl_gym.backends.base import BackendFacts, ContradictoryReply, Dialect
from prorl_gym.backends.transport import Endpoint, json_object, refusal
from prorl_gym.errors import BackendError
from prorl_gym.tokens.ledger import LOGPROB_TOLERANCE
from prorl_gym.tokens.records import FinishReason, GenerateParams, Generation, VersionSpan

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_MAX_TOKEN_ID = 2**31 - 1


class VllmDialect(Dialect):
    """Talks to a vLLM server, or to anything that answers like one.

    Args:
        endpoint: Where it is.
        model: The id to look for in /v1/models; None takes the first.
    """

    name = "vllm"

    def __init__(self, endpoint: Endpoint, model: str | None = None) -> None:
        self._endpoint = endpoint
        self._model = model

    async def probe(self) -> BackendFacts:
        """Read /v1/models; see `Dialect.probe`."""
        status, reply = await self._endpoint.get("/v1/models")
        if status != 200:
            raise refusal(status, reply)
        cards = json_object(reply).get("data")
        if not isinstance(cards, list) or not cards or not all(isinstance(card, dict) for card in cards):
            raise ContradictoryReply("/v1/models lists no model")
        for card in cards:
            if self._model in {None, card.get("id")} and isinstance(card.get("id"), str):
                length = card.get("max_model_len")
                return BackendFacts(card["id"], length if isinstance(length, int) else None)
        raise BackendError(f"it serves {[card.get('id') for card in cards]}, not {self._model!r}", retryable=False)

    async def healthy(self) -> bool:
        """Ask /health."""
        try:
            status, _ = await self._endpoint.get("/health")
        except BackendError:
            return False
        return status == 200

    async def generate(self, prompt_ids: Sequence[int], params: GenerateParams, *, model: str) -> Generation:
        """See `Dialect.generate`."""
        prompt = prompt_ids if isinstance(prompt_ids, list) else list(prompt_ids)
        began = time.monotonic()
        reply = await self._endpoint.post_json("/v1/completions", _request(prompt, params, model))
        latency_s = time.monotonic() - began
        choice = _only_choice(reply)
        finish_reason = _FINISH_REASONS.get(choice.get("finish_reason") or "")
        if finish_reason is None:
            raise ContradictoryReply(f"finish_reason is {choice.get('finish_reason')!r}")
        output_ids = _ids(choice.get("token_ids"), "token_ids")
        if not output_ids and finish_reason != "abort":
            raise ContradictoryReply(f"no token was sampled, yet finish_reason is {finish_reason!r}")
        if len(output_ids) > params.max_tokens:
            raise ContradictoryReply(f"{len(output_ids)} ids were sampled where {params.max_tokens} were asked for")
        _check_usage(reply.get("usage"), len(prompt), len(output_ids))
        if choice.get("prompt_token_ids") not in (None, prompt):
            raise ContradictoryReply("prompt_token_ids is not the prompt that was sent")
        return Generation(
            output_ids=output_ids,
            logprobs=_logprobs(choice.get("logprobs"), len(output_ids)),
            finish_reason=finish_reason,
            versions=_versions(choice.get("weight_versions"), len(output_ids)),
            backend=self._endpoint.address,
            latency_s=latency_s,
        )


def _request(prompt: list[int], params: GenerateParams, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "logprobs": 0,
        "return_token_ids": True,
    }
    optional = {"top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p, "seed": params.seed}
    body.update((name, value) for name, value in optional.items() if value is not None)
    if params.stop:
        body["stop"] = list(params.stop)
    if params.stop_token_ids:
        body["stop_token_ids"] = list(params.stop_token_ids)
    return body


def _only_choice(reply: dict[str, Any]) -> dict[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ContradictoryReply("the reply does not hold exactly one choice")
    return choices[0]


def _ids(value: object, field: str) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ContradictoryReply(f"{field} is not a list of token ids: the engine needs return_token_ids")
    if min(value, default=0) < 0 or max(value, default=0) > _MAX_TOKEN_ID:
        raise ContradictoryReply(f"{field} holds a number that is no token id")
    return value


def _logprobs(value: object, count: int) -> list[float]:
    logprobs = value.get("token_logprobs") if isinstance(value, dict) else None
    if logprobs is None and count == 0:
        return []
    if not isinstance(logprobs, list):
        raise ContradictoryReply("the reply holds no logprobs")
    if len(logprobs) != count:
        raise ContradictoryReply(f"{count} ids came with {len(logprobs)} logprobs")
    if not set(map(type, logprobs)) <= {float, int} or not all(map(math.isfinite, logprobs)):
        raise ContradictoryReply("logprobs holds something that is no finite number")
    if max(logprobs, default=0.0) > LOGPROB_TOLERANCE:
        raise ContradictoryReply(f"logprobs holds {max(logprobs)}, which is no log-probability")
    return list(map(float, logprobs))


def _check_usage(usage: object, prompt_tokens: int, completion_tokens: int) -> None:
    if not isinstance(usage, dict):
        raise ContradictoryReply("the reply holds no usage")
    counted = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if counted != (prompt_tokens, completion_tokens):
        raise ContradictoryReply(
            f"usage counts {counted[0]} prompt and {counted[1]} sampled tokens; "
            f"{prompt_tokens} were sent and {completion_tokens} ids came back"
        )


def _versions(value: object, count: int) -> tuple[VersionSpan, ...]:
    if value is None or value == []:
        return ()
    spans: list[VersionSpan] = []
    end = 0
    for entry in value if isinstance(value, list) else [None]:
        fields = entry if isinstance(entry, dict) else {}
        span = VersionSpan(*(fields.get(name, -1) for name in ("start", "end", "version")))
        if not {type(span.start), type(span.end), type(span.version)} <= {int}:
            raise ContradictoryReply(f"weight_versions is malformed: {value!r}")
        if span.start != end or span.end <= span.start:
            raise ContradictoryReply(f"weight_versions leave a gap or overlap: {value!r}")
        spans.append(span)
        end = span.end
    if end != count:
        raise ContradictoryReply(f"weight_versions cover {end} of {count} sampled ids")
    return tuple(spans)
