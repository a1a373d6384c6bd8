"""The append-only record of one job's episode: owned by the pipeline, written by the loop.

Whatever happens to the job, what was recorded stays. A segment only ever grows at its end, and only when the ids of the
next prompt really begin with it; anything else opens a new segment.
"""

import math
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from prorl_gym.errors import BackendError
from prorl_gym.tokens.body import without_surrogates
from prorl_gym.tokens.ledger import LOGPROB_TOLERANCE, chain
from prorl_gym.tokens.records import ChatMessage, Generation, Parsed, Rendered, VersionSpan
from prorl_gym.tokens.trajectory import Call, Entry, Placement, SegmentTokens, Trajectory


class Recorder:
    """Takes down messages and model calls of one episode, of one agent or of several.

    Synchronous code for one writer at a time: the event loop's thread, or the thread of a plain `def` handler. Any
    thread may `freeze()` meanwhile.
    """

    def __init__(self) -> None:
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._entries: list[Entry] = []
        self._placements: list[Placement | None] = []
        self._pending: dict[str, list[int]] = {}
        self._parts: list[SegmentTokens] = []
        self._current: dict[str, int] = {}
        self._calls: list[Call] = []
        self._lock = threading.Lock()

    def set_tools(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        """Record the function schemas that the model is shown."""
        self._tools = tuple(schemas)

    def add_messages(self, messages: Sequence[ChatMessage], *, agent: str = "main") -> None:
        """Record observed messages; partial results show them at once, their ids are known after the next call."""
        with self._lock:
            for message in messages:
                self._pending.setdefault(agent, []).append(self._add(agent, message, None))

    def add_call(self, prompt: Rendered, generation: Generation, parsed: Parsed, *, agent: str = "main") -> None:
        """Record one model call: the new ids of its prompt, what was sampled, and the assistant message read from it.

        The agent's segment is continued when the prompt begins with all of its ids, whatever `append_only` says; else
        a new segment is opened with the whole prompt. Where the engine told which prompt it saw, that one counts.

        Raises:
            BackendError: The generation contradicts itself or holds a number that is none. Nothing of it is recorded.
        """
        output, logprobs, versions = _checked(generation)
        prompt_ids = prompt.ids if generation.prompt_ids is None else generation.prompt_ids
        ids = _packed(prompt_ids, "prompt_ids")
        pending = self._pending.get(agent, [])
        index, start = self._place(agent, ids, has_new_messages=bool(pending))
        rewritten = start == 0 and agent in self._current
        part = self._parts[index] if index < len(self._parts) else SegmentTokens(agent, array("i"), array("d"), [])
        spans = prompt.spans if generation.prompt_ids is None or generation.prompt_ids == prompt.ids else ()
        ranges = self._ranges(pending, spans, None if rewritten else start, len(ids))
        call = Call(
            index=len(self._calls),
            agent=agent,
            segment=index,
            start=start,
            output_start=len(ids),
            end=len(ids) + len(output),
            sampled_before=len(part.logprobs),
            versions=versions,
            backend=generation.backend,
            finish_reason=generation.finish_reason,
            complete=parsed.complete,
            latency_s=generation.latency_s,
            retries=generation.retries,
            digest=chain(part.calls[-1].digest if part.calls else None, ids[start:], output),
            recorded_at=time.time(),
        )
        with self._lock:
            if index == len(self._parts):
                self._parts.append(part)
            part.ids.extend(ids[start:])
            part.ids.extend(output)
            part.logprobs.extend(logprobs)
            part.calls.append(call)
            self._calls.append(call)
            self._current[agent] = index
            for entry, (first, last) in zip(pending, ranges, strict=True):
                self._placements[entry] = Placement(index, first, last)
            self._pending[agent] = []
            self._add(agent, parsed.message, Placement(index, call.output_start, call.end, call))

    def freeze(self) -> Trajectory:
        """An immutable snapshot, to be exported in any thread; costs a copy of the raw ids, no lists."""
        with self._lock:
            return Trajectory(
                self._tools,
                tuple(self._entries),
                tuple(self._placements),
                tuple(part.copy() for part in self._parts),
                tuple(self._calls),
            )

    def messages(self, token_ids: bool = True) -> list[dict[str, Any]]:
        """See `Trajectory.messages`."""
        return self.freeze().messages(token_ids)

    def segments(self) -> list[dict[str, Any]]:
        """See `Trajectory.segments`."""
        return self.freeze().segments()

    def ledger(self) -> list[dict[str, Any]]:
        """See `Trajectory.ledger`."""
        return self.freeze().ledger()

    def policy_versions(self) -> dict[str, int | None]:
        """See `Trajectory.policy_versions`."""
        return self.freeze().policy_versions()

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Function schemas that the model is shown."""
        return [dict(schema) for schema in self._tools]

    @property
    def num_turns(self) -> int:
        """Model calls so far."""
        return len(self._calls)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled so far."""
        return sum(len(part.logprobs) for part in self._parts)

    def _add(self, agent: str, message: ChatMessage, placement: Placement | None) -> int:
        content = without_surrogates(message.content)
        reasoning = None if message.reasoning is None else without_surrogates(message.reasoning)
        if content is not message.content or reasoning is not message.reasoning:
            message = replace(message, content=content, reasoning=reasoning)
        self._entries.append(Entry(agent, message))
        self._placements.append(placement)
        return len(self._entries) - 1

    def _place(self, agent: str, ids: "array[int]", *, has_new_messages: bool) -> tuple[int, int]:
        """Segment of a prompt and where its new ids begin there; (number of segments, 0) opens a new one.

        New ids that no message accounts for cannot be told from a rewrite, so they open a segment too.
        """
        index = self._current.get(agent)
        if index is not None:
            known = self._parts[index].ids
            if ids[: len(known)] == known and (has_new_messages or len(ids) == len(known)):
                return index, len(known)
        return len(self._parts), 0

    def _ranges(
        self, pending: Sequence[int], spans: Sequence[tuple[int, int]], start: int | None, end: int
    ) -> list[tuple[int, int]]:
        """The ids of each new message; `start` is where the first one begins, None for a prompt that was rewritten."""
        if not pending:
            return []
        told = list(spans[-len(pending) :])
        if len(told) == len(pending) and told[-1][1] == end and told[0][0] >= 0:
            seamless = all(a[1] == b[0] for a, b in pairwise(told))
            if seamless and all(a <= b for a, b in told) and (start is None or told[0][0] == start):
                return told
        if start is None:
            return [(end, end)] * len(pending)
        heir = 0
        if start == 0:
            heir = next((i for i, e in enumerate(pending) if self._entries[e].message.role == "user"), 0)
        return [(start, start)] * heir + [(start, end)] + [(end, end)] * (len(pending) - heir - 1)


def _packed(ids: Sequence[int], field: str) -> "array[int]":
    try:
        packed = array("i", ids)
    except (TypeError, OverflowError) as error:
        raise BackendError(f"{field} holds something that is no token id: {error}") from error
    if packed and min(packed) < 0:
        raise BackendError(f"{field} holds a negative token id")
    return packed


def _checked(generation: Generation) -> "tuple[array[int], array[float], tuple[VersionSpan, ...]]":
    """Ids, logprobs and version spans of a generation that is consistent.

    Raises:
        BackendError: It is not.
    """
    output = _packed(generation.output_ids, "output_ids")
    if not output:
        raise BackendError("the engine sampled no token at all")
    if len(generation.logprobs) != len(output):
        raise BackendError(f"{len(output)} sampled ids came with {len(generation.logprobs)} logprobs")
    try:
        logprobs = array("d", generation.logprobs)
    except TypeError as error:
        raise BackendError(f"logprobs holds something that is no number: {error}") from error
    for position, logprob in enumerate(logprobs):
        if not math.isfinite(logprob) or logprob > LOGPROB_TOLERANCE:
            raise BackendError(f"logprobs[{position}] is {logprob}, which is no log-probability")
    versions = generation.versions or (VersionSpan(0, len(output), None),)
    edges = [0, *(span.end for span in versions)]
    starts = [span.start for span in versions]
    if starts != edges[:-1] or edges[-1] != len(output) or any(a >= b for a, b in pairwise(edges)):
        raise BackendError(f"version spans {starts} do not cover the {len(output)} sampled ids without gaps")
    return output, logprobs, versions
