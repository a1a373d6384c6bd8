"""Turns a scripted reply into the body vLLM would send for it, faults included.

What depends on the reply and the limits only is encoded once and cached.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from prorl_gym.testing.byte_tokenizer import Tokenizer
from prorl_gym.testing.script import Reply

_SHORT_BY = 3
DEFAULT_MAX_TOKENS = 16  # vLLM's, for /v1/completions
_BAD_LAST_LOGPROB = {
    "nan_logprobs": b"NaN",
    "inf_logprobs": b"-Infinity",
    "null_logprobs": b"null",
    "overflow_logprobs": b"-1e999",
}


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The part of an answer that depends on the reply and the limits only, encoded once."""

    text: str
    finish_reason: str
    completion_tokens: int
    ids: bytes
    logprobs: bytes
    weight_versions: list[dict[str, int]] | None


class ReplyEncoder:
    """Encodes replies for one model name and tokenizer."""

    def __init__(self, tokenizer: Tokenizer, model: str) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self.created = int(time.time())
        self._sampled = lru_cache(maxsize=4096)(self._sample)

    def body(self, index: int, prompt: Sequence[int], params: dict[str, Any], reply: Reply) -> bytes:
        """Return the whole body for call number `index`."""
        sampled = self._sampled(reply, params.get("max_tokens", DEFAULT_MAX_TOKENS))
        with_ids = bool(params.get("return_token_ids"))
        with_logprobs = params.get("logprobs") is not None and reply.fault != "no_logprobs"
        count = params.get("n") or 1
        choices = [
            {
                "index": choice,
                "text": sampled.text,
                "logprobs": orjson.Fragment(sampled.logprobs) if with_logprobs else None,
                "finish_reason": sampled.finish_reason,
                "stop_reason": None,
                "token_ids": orjson.Fragment(sampled.ids) if with_ids else None,
                "prompt_logprobs": None,
                "prompt_token_ids": prompt if with_ids else None,
                **({"weight_versions": sampled.weight_versions} if sampled.weight_versions else {}),
            }
            for choice in range(count)
        ]
        completion_tokens = sampled.completion_tokens * count
        return orjson.dumps(
            {
                "id": f"cmpl-{index}",
                "object": "text_completion",
                "created": self.created,
                "model": self._model,
                "choices": [] if reply.fault == "no_choices" else choices,
                "usage": {
                    "prompt_tokens": len(prompt),
                    "total_tokens": len(prompt) + completion_tokens,
                    "completion_tokens": completion_tokens,
                    "prompt_tokens_details": None,
                },
            }
        )

    def _sample(self, reply: Reply, max_tokens: int) -> _Sampled:
        ids = list(reply.ids) if reply.ids is not None else list(self._tokenizer.encode(reply.text))
        end_turn = reply.end_turn if reply.end_turn is not None else reply.ids is None
        if end_turn and reply.finish_reason == "stop":
            eos = getattr(self._tokenizer, "eos_token_id", None)
            if eos is not None:
                ids.append(eos)
        finish_reason, text = reply.finish_reason, reply.text
        if len(ids) > max_tokens:
            ids, finish_reason = ids[:max_tokens], "length"
        if not text or finish_reason == "length":
            text = self._tokenizer.decode(ids)
        usage = len(ids)
        logprobs = list(reply.logprobs[: len(ids)]) if reply.logprobs is not None else _generated_logprobs(ids)
        if reply.fault == "short_ids":
            ids, logprobs = ids[:-_SHORT_BY], logprobs[:-_SHORT_BY]
        elif reply.fault == "short_logprobs":
            logprobs = logprobs[:-1]
        spans = reply.weight_versions
        return _Sampled(
            text=text,
            finish_reason=finish_reason,
            completion_tokens=usage,
            ids=b"null" if reply.fault == "null_ids" else orjson.dumps(ids),
            logprobs=_logprobs_json(ids, logprobs, reply.fault),
            weight_versions=None if spans is None else [{"version": v, "start": s, "end": e} for v, s, e in spans],
        )


def _generated_logprobs(ids: Sequence[int]) -> list[float]:
    """Return one logprob per id, between -1.000 and -0.001, a fixed function of id and position."""
    return [-((token * 7919 + position * 104729) % 1000 + 1) / 1000 for position, token in enumerate(ids)]


def _logprobs_json(ids: Sequence[int], logprobs: Sequence[float], fault: str | None) -> bytes:
    numbers = [
        repr(float(value)).encode() if math.isfinite(value) else json.dumps(value).encode() for value in logprobs
    ]
    if numbers and fault in _BAD_LAST_LOGPROB:
        numbers[-1] = _BAD_LAST_LOGPROB[fault]
    tokens = orjson.dumps([f"token_id:{token}" for token in ids])
    return (
        b'{"text_offset":[],"token_logprobs":['
        + b",".join(numbers)
        + b'],"tokens":'
        + tokens
        + b',"top_logprobs":null}'
    )
