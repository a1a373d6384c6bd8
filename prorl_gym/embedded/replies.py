"""Builds replies out of ended sequences, in vLLM's shape."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any

from prorl_gym.embedded.protocol import ChatRequest, CompletionRequest
from prorl_gym.embedded.sequence import Sequence
from prorl_gym.embedded.text import TextCodec

#: JSON has no -inf; vLLM sends this for a token that was cut off.
LOWEST_LOGPROB = -9999.0


def completion_reply(
    request: CompletionRequest, reply_id: str, model: str, sequences: Seq[Sequence], codec: TextCodec
) -> dict[str, Any]:
    """The reply; `sequences` in order of prompts, then of samples."""
    return {
        "id": reply_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(index, s, request, codec) for index, s in enumerate(sequences)],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": _usage(sequences, request.n or 1),
        "kv_transfer_params": None,
    }


def chat_reply(
    request: ChatRequest, reply_id: str, model: str, sequences: Seq[Sequence], codec: TextCodec
) -> dict[str, Any]:
    """The reply to a conversation; `sequences` are its samples."""
    return {
        "id": reply_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_chat_choice(index, s, request, codec) for index, s in enumerate(sequences)],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": _usage(sequences, len(sequences)),
        "prompt_logprobs": None,
        "prompt_token_ids": sequences[0].prompt_ids if request.return_token_ids else None,
        "kv_transfer_params": None,
    }


def _usage(sequences: Seq[Sequence], per_prompt: int) -> dict[str, Any]:
    prompt_tokens = sum(len(s.prompt_ids) for s in sequences[::per_prompt])
    sampled_tokens = sum(len(s.output_ids) for s in sequences)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + sampled_tokens,
        "completion_tokens": sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in sequences[::per_prompt])},
    }


def _chat_choice(index: int, sequence: Sequence, request: ChatRequest, codec: TextCodec) -> dict[str, Any]:
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": _text(sequence, codec, skip_special_tokens=request.skip_special_tokens),
            "refusal": None,
            "tool_calls": [],
        },
        "logprobs": None if request.alternatives is None else {"content": _chat_logprobs(sequence, request, codec)},
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "token_ids": sequence.output_ids if request.return_token_ids else None,
    }


def _chat_logprobs(sequence: Sequence, request: ChatRequest, codec: TextCodec) -> list[dict[str, Any]]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = codec.decode([token_id], skip_special_tokens=False)
        name = f"token_id:{token_id}" if request.return_tokens_as_token_ids else text
        return {"token": name, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(text.encode())}

    return [
        {**entry(token_id, logprob), "top_logprobs": [entry(*alternative) for alternative in alternatives]}
        for token_id, logprob, alternatives in zip(
            sequence.output_ids, sequence.logprobs, sequence.top_logprobs, strict=True
        )
    ]


def _choice(index: int, sequence: Sequence, request: CompletionRequest, codec: TextCodec) -> dict[str, Any]:
    return {
        "index": index,
        "text": _text(sequence, codec, skip_special_tokens=request.skip_special_tokens),
        "logprobs": None if request.logprobs is None else _logprobs(sequence, request, codec),
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "token_ids": sequence.output_ids if request.return_token_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": sequence.prompt_ids if request.return_token_ids else None,
    }


def _text(sequence: Sequence, codec: TextCodec, *, skip_special_tokens: bool) -> str:
    if sequence.text is not None:
        return sequence.text
    ids = sequence.output_ids
    # The token that stopped the sequence is in token_ids, its text is not in text.
    if sequence.finish_reason == "stop":
        ids = ids[:-1]
    return codec.decode(ids, skip_special_tokens=skip_special_tokens)


def _logprobs(sequence: Sequence, request: CompletionRequest, codec: TextCodec) -> dict[str, Any]:
    names: dict[int, str] = {}

    def name(token_id: int) -> str:
        if token_id not in names:
            as_id = request.return_tokens_as_token_ids
            names[token_id] = f"token_id:{token_id}" if as_id else codec.decode([token_id], skip_special_tokens=False)
        return names[token_id]

    tokens = [name(token_id) for token_id in sequence.output_ids]
    offsets: list[int] = []
    offset = 0
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    top: list[dict[str, float]] = []
    for token, logprob, alternatives in zip(tokens, sequence.logprobs, sequence.top_logprobs, strict=True):
        entry = {token: max(logprob, LOWEST_LOGPROB)}
        for token_id, value in alternatives:
            entry.setdefault(name(token_id), max(value, LOWEST_LOGPROB))
        top.append(entry)
    return {
        "text_offset": offsets,
        "token_logprobs": [max(value, LOWEST_LOGPROB) for value in sequence.logprobs],
        "tokens": tokens,
        "top_logprobs": top,
    }
