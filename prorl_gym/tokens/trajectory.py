"""What one episode recorded, frozen: the exports that a result, a partial result and a rollout file are made of.

The token ids of a segment are stored once. What a message or a call stands for is a range of them, and becomes a list
only when it is exported.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prorl_gym.tokens.records import ChatMessage, FinishReason, VersionSpan


@dataclass(frozen=True, slots=True)
class Call:
    """One model call: where its tokens lie in its segment, and what the ledger says of it.

    Attributes:
        index: Number of the call within the episode, from 0.
        segment: Index of its segment.
        start: Where its new prompt ids begin, counted over the segment's prompt and response.
        output_start: Where its sampled ids begin.
        end: One past its last sampled id.
        sampled_before: Ids sampled earlier in the segment: where its logprobs begin there.
        versions: Over the sampled ids of this call.
        complete: The turn ended with an end-of-turn token.
        digest: Hex; see `ledger.chain`.
        recorded_at: Unix time in seconds.
    """

    index: int
    agent: str
    segment: int
    start: int
    output_start: int
    end: int
    sampled_before: int
    versions: tuple[VersionSpan, ...]
    backend: str
    finish_reason: FinishReason
    complete: bool
    latency_s: float
    retries: tuple[str, ...]
    digest: str
    recorded_at: float


@dataclass(slots=True)
class SegmentTokens:
    """The tokens of one segment; grows while it is a recorder's, never again in a trajectory.

    Attributes:
        ids: [P + R] int, prompt then response.
        logprobs: [sampled] float, of the sampled ids alone, call after call.
        calls: The calls that sampled them, in order; the first one's prompt is the segment's prompt.
    """

    agent: str
    ids: "array[int]"
    logprobs: "array[float]"
    calls: list[Call]

    @property
    def prompt_length(self) -> int:
        """P, the ids before the first sampled one."""
        return self.calls[0].output_start

    def copy(self) -> "SegmentTokens":
        """A copy that later calls do not reach."""
        return SegmentTokens(self.agent, self.ids[:], self.logprobs[:], self.calls[:])

    def logprobs_of(self, call: Call) -> list[float]:
        """One per id that the call sampled."""
        return self.logprobs[call.sampled_before : call.sampled_before + call.end - call.output_start].tolist()

    def export(self) -> dict[str, Any]:
        """The segment in the shape of `types.Segment`."""
        prompt = self.prompt_length
        response = self.ids[prompt:].tolist()
        mask = [0] * len(response)
        logprobs = [0.0] * len(response)
        versions: list[list[int | None]] = []
        for call in self.calls:
            start, end = call.output_start - prompt, call.end - prompt
            mask[start:end] = [1] * (end - start)
            logprobs[start:end] = self.logprobs_of(call)
            versions.extend([start + span.start, start + span.end, span.version] for span in call.versions)
        return {
            "prompt_ids": self.ids[:prompt].tolist(),
            "response_ids": response,
            "response_mask": mask,
            "logprobs": logprobs,
            "versions": versions,
            "agent": self.agent,
            "num_turns": len(self.calls),
        }


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ids of a message lie: `[start, end)` of a segment, and the call that sampled it, if one did."""

    segment: int
    start: int
    end: int
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A message and the agent it belongs to."""

    agent: str
    message: ChatMessage


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The record of one episode at one moment. Immutable, so any thread may export it.

    Attributes:
        tools: Function schemas shown to the model.
        entries: Every message, in the order in which they came about.
        placements: One per entry; None while no call has seen the message.
        parts: The segments, in the order in which they were opened.
        calls: Every call of every agent, in order.
    """

    tools: tuple[Mapping[str, Any], ...]
    entries: tuple[Entry, ...]
    placements: tuple[Placement | None, ...]
    parts: tuple[SegmentTokens, ...]
    calls: tuple[Call, ...]

    @property
    def num_turns(self) -> int:
        """Model calls so far."""
        return len(self.calls)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled, over all segments."""
        return sum(call.end - call.output_start for call in self.calls)

    def messages(self, token_ids: bool = True) -> list[dict[str, Any]]:
        """The messages in the shape of `types.Message`.

        The `token_ids` of all messages of an agent's first segment, one after the other, are that segment. In a later
        segment the re-rendered history stands in the segment's `prompt_ids` only, and the messages give the rest.

        Args:
            token_ids: False leaves out every list of ids and logprobs, which grow with the square of the turns.
        """
        return [
            self._export(entry, placement, token_ids)
            for entry, placement in zip(self.entries, self.placements, strict=True)
        ]

    def segments(self) -> list[dict[str, Any]]:
        """The segments in the shape of `types.Segment`; each response ends with the last sampled id."""
        return [part.export() for part in self.parts]

    def ledger(self) -> list[dict[str, Any]]:
        """One record per model call, with at least what `ledger.LedgerRecord` has."""
        records = []
        for call in self.calls:
            part = self.parts[call.segment]
            records.append(
                {
                    "call": call.index,
                    "agent": call.agent,
                    "segment": call.segment,
                    "prompt_tokens": call.output_start,
                    "new_prompt_tokens": call.output_start - call.start,
                    "output_ids": part.ids[call.output_start : call.end].tolist(),
                    "logprobs": part.logprobs_of(call),
                    "versions": [[span.start, span.end, span.version] for span in call.versions],
                    "backend": call.backend,
                    "finish_reason": call.finish_reason,
                    "complete": call.complete,
                    "latency_s": call.latency_s,
                    "retries": list(call.retries),
                    "digest": call.digest,
                    "recorded_at": call.recorded_at,
                }
            )
        return records

    def policy_versions(self) -> dict[str, int | None]:
        """The oldest and the newest version that sampled a token; both None when no backend gave one."""
        seen = [span.version for call in self.calls for span in call.versions if span.version is not None]
        return {"min": min(seen, default=None), "max": max(seen, default=None)}

    def _export(self, entry: Entry, placement: Placement | None, token_ids: bool) -> dict[str, Any]:
        message = entry.message
        exported: dict[str, Any] = {
            "role": message.role,
            "content": message.content,
            "agent": entry.agent,
            "segment": None if placement is None else placement.segment,
        }
        if message.reasoning is not None:
            exported["reasoning_content"] = message.reasoning
        if message.tool_requests:
            exported["tool_calls"] = [
                {"id": request.id, "name": request.name, "arguments": request.arguments, "error": request.error}
                for request in message.tool_requests
            ]
        if message.tool_call_id is not None:
            exported["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            exported["name"] = message.name
        if placement is None:
            return exported
        if placement.call is not None and placement.call.versions:
            exported["policy_version"] = placement.call.versions[-1].version
        if token_ids:
            exported |= self._tokens(placement)
        return exported

    def _tokens(self, placement: Placement) -> dict[str, Any]:
        part = self.parts[placement.segment]
        ids = part.ids[placement.start : placement.end].tolist()
        if placement.call is None:
            return {"token_ids": ids}
        return {
            "token_ids": ids,
            "input_ids": part.ids[: placement.start].tolist(),
            "output_ids": ids.copy(),
            "logprobs": part.logprobs_of(placement.call),
        }
