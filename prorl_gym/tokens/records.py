"""Values that travel between renderer, backend, loop and recorder.

The invariant of the whole package: `prompt(k+1) == prompt(k) + sampled(k) + new observation ids`, and sampled ids are
never decoded and encoded again, trimmed or repaired.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """One tool call read out of sampled text.

    Attributes:
        id: Unique within the episode; the tool message that answers it carries the same.
        name: As the model wrote it; may name no tool at all.
        arguments: The parsed object, or None when the call was malformed or cut off; it then never runs.
        error: For a malformed call, what to tell the model; else None.
    """

    id: str
    name: str
    arguments: dict[str, Any] | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message in the terms of a chat template.

    `content` is plain data: text in it that looks like a control token is ordinary text.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_requests: tuple[ToolRequest, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as token ids.

    Attributes:
        ids: [P] int. The whole prompt.
        spans: For each message that is new in this prompt, its half-open range in `ids`, frame included, in order and
            without gaps; the last one holds the generation prompt. Empty where the renderer cannot tell.
        append_only: True when `ids` starts with the prompt and the sampled ids of the call before.
    """

    ids: list[int]
    spans: tuple[tuple[int, int], ...] = ()
    append_only: bool = True


@dataclass(frozen=True, slots=True)
class Parsed:
    """What sampled ids say.

    Attributes:
        message: Text, reasoning and tool calls; the raw ids stay the truth.
        complete: True when the turn ended with an end-of-turn token, false when it was cut.
    """

    message: ChatMessage
    complete: bool


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Half-open range over one generation's `output_ids` and the policy version that sampled it."""

    start: int
    end: int
    version: int | None


@dataclass(frozen=True, slots=True)
class Generation:
    """One model call's sampled tokens, as the engine reported them.

    Attributes:
        output_ids: [T] int, a sampled stop token included.
        logprobs: [T] float, natural log, of the distribution sampled from; finite.
        finish_reason: "abort" only where the engine cut the call and nothing continued it.
        versions: Spans covering `output_ids` without gaps.
        backend: Address that sampled the last token.
        prompt_ids: The prompt as the engine saw it, where the engine says so (`openai_chat`); else None: ours.
        latency_s: Seconds from sending to the last byte, waits between attempts left out.
        retries: What failed before this reply, in words; kept in the ledger.
    """

    output_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    backend: str
    prompt_ids: list[int] | None = None
    latency_s: float = 0.0
    retries: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """What one model call asks of the engine; None leaves the engine's default."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
