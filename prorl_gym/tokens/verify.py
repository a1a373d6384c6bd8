"""Checks a result against its own ledger: every token accounted for, every digest as it was when the token was sampled.

Nothing here trusts a length or a type; a row of any shape gives problems, never an exception.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from prorl_gym.tokens.ledger import LOGPROB_TOLERANCE, LedgerRecord, chain

_MAX_ID = 1 << 31
Span = tuple[int, int, int | None]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that does not hold, and the field of the row where it shows."""

    field: str
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found in one row.

    Attributes:
        calls: Model calls in its ledger.
        sampled_tokens: Ids that the policy sampled, over all segments.
        tokens: Ids of all segments.
    """

    problems: tuple[Problem, ...]
    calls: int = 0
    sampled_tokens: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Segment:
    """A segment whose lists have the right types and lengths."""

    field: str
    agent: str
    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[Span]
    num_turns: int

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.response


class _Broken(Exception):
    """A problem after which the rest of the row cannot be read."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(field, message)


def verify_result(result: Mapping[str, Any]) -> Verdict:
    """Check one result, in the shape of `types.JobResult`.

    What is checked: lengths and types; masks cover exactly the sampled ids; logprobs are finite, one per sampled id;
    version spans cover the sampled ids; each prompt begins with the prompt and the sampled ids before it; the digests;
    the ids of the messages, one after the other, are their segment.
    """
    try:
        segments = [_segment(raw, f"segments[{i}]") for i, raw in enumerate(_list(result, "segments"))]
        records = [_record(raw, f"ledger[{i}]") for i, raw in enumerate(_ledger(result, bool(segments)))]
    except _Broken as broken:
        return Verdict((broken.problem,))
    problems: list[Problem] = []
    reward = result.get("reward")
    if reward is not None and not _is_finite(reward):
        problems.append(Problem("reward", f"{reward!r} is no finite number"))
    for segment in segments:
        problems.extend(_check_versions(segment))
    problems.extend(_check_calls(segments, records))
    problems.extend(_check_policy_versions(result.get("policy_versions"), segments))
    try:
        problems.extend(_check_messages(_list(result, "messages"), segments, records))
    except _Broken as broken:
        problems.append(broken.problem)
    sampled = sum(sum(segment.mask) for segment in segments)
    return Verdict(tuple(problems), len(records), sampled, sum(len(segment.ids) for segment in segments))


def _ledger(result: Mapping[str, Any], needed: bool) -> list[Any]:
    if result.get("ledger") is None and not needed:
        return []
    if result.get("ledger") is None:
        raise _Broken("ledger", "is missing, so nothing proves the segments (roll out with return_ledger)")
    return _list(result, "ledger")


def _list(container: Mapping[str, Any], key: str, field: str | None = None) -> list[Any]:
    value = container.get(key, [])
    if not isinstance(value, list):
        raise _Broken(field or key, f"is no list but {type(value).__name__}")
    return value


def _ids(container: Mapping[str, Any], key: str, field: str) -> list[int]:
    ids = _list(container, key, f"{field}.{key}")
    for at, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < _MAX_ID:
            raise _Broken(f"{field}.{key}[{at}]", f"{token!r} is no token id")
    return ids


def _logprobs(container: Mapping[str, Any], key: str, field: str) -> list[float]:
    logprobs = _list(container, key, f"{field}.{key}")
    for at, logprob in enumerate(logprobs):
        if not _is_finite(logprob) or logprob > LOGPROB_TOLERANCE:
            raise _Broken(f"{field}.{key}[{at}]", f"{logprob!r} is no log-probability")
    return logprobs


def _spans(container: Mapping[str, Any], key: str, field: str) -> list[Span]:
    spans = _list(container, key, f"{field}.{key}")
    for at, span in enumerate(spans):
        well_formed = isinstance(span, list) and len(span) == 3 and all(type(edge) is int for edge in span[:2])
        if not well_formed or not (span[2] is None or type(span[2]) is int) or not 0 <= span[0] < span[1]:
            raise _Broken(f"{field}.{key}[{at}]", f"{span!r} is no span [start, end, version]")
    return [(start, end, version) for start, end, version in spans]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _segment(raw: object, field: str) -> _Segment:
    if not isinstance(raw, Mapping):
        raise _Broken(field, "is no object")
    prompt, response = _ids(raw, "prompt_ids", field), _ids(raw, "response_ids", field)
    mask, logprobs = _ids(raw, "response_mask", field), _logprobs(raw, "logprobs", field)
    for key, values in (("response_mask", mask), ("logprobs", logprobs)):
        if len(values) != len(response):
            raise _Broken(f"{field}.{key}", f"has {len(values)} entries for {len(response)} response ids")
    for at, (sampled, logprob) in enumerate(zip(mask, logprobs, strict=True)):
        if sampled not in (0, 1):
            raise _Broken(f"{field}.response_mask[{at}]", f"is {sampled}, neither 0 nor 1")
        if not sampled and logprob != 0:
            raise _Broken(f"{field}.logprobs[{at}]", f"is {logprob} where nothing was sampled")
    if not prompt:
        raise _Broken(f"{field}.prompt_ids", "is empty")
    if not mask or not mask[-1]:
        raise _Broken(f"{field}.response_mask", "does not end with a sampled id")
    agent, num_turns = raw.get("agent", "main"), raw.get("num_turns", 0)
    if type(num_turns) is not int or not isinstance(agent, str):
        raise _Broken(field, f"agent {agent!r} is no name or num_turns {num_turns!r} no number")
    return _Segment(field, agent, prompt, response, mask, logprobs, _spans(raw, "versions", field), num_turns)


def _record(raw: object, field: str) -> LedgerRecord:
    if not isinstance(raw, Mapping):
        raise _Broken(field, "is no object")
    for key in ("call", "segment", "prompt_tokens", "new_prompt_tokens"):
        if type(raw.get(key)) is not int or raw[key] < 0:
            raise _Broken(f"{field}.{key}", f"{raw.get(key)!r} is no count")
    for key in ("agent", "digest"):
        if not isinstance(raw.get(key), str):
            raise _Broken(f"{field}.{key}", f"{raw.get(key)!r} is no text")
    output_ids, logprobs = _ids(raw, "output_ids", field), _logprobs(raw, "logprobs", field)
    if not output_ids:
        raise _Broken(f"{field}.output_ids", "is empty")
    if len(logprobs) != len(output_ids):
        raise _Broken(f"{field}.logprobs", f"has {len(logprobs)} entries for {len(output_ids)} sampled ids")
    spans = _spans(raw, "versions", field)
    edges = [0, *(span[1] for span in spans)]
    if [span[0] for span in spans] != edges[:-1] or edges[-1] != len(output_ids):
        raise _Broken(f"{field}.versions", f"does not cover the {len(output_ids)} sampled ids without gaps")
    return LedgerRecord(
        call=raw["call"],
        agent=raw["agent"],
        segment=raw["segment"],
        prompt_tokens=raw["prompt_tokens"],
        new_prompt_tokens=raw["new_prompt_tokens"],
        output_ids=output_ids,
        logprobs=logprobs,
        versions=spans,
        digest=raw["digest"],
    )


def _check_versions(segment: _Segment) -> Iterator[Problem]:
    """Spans in order, over sampled ids and over all of them."""
    field = f"{segment.field}.versions"
    if any(a[1] > b[0] for a, b in pairwise(segment.versions)):
        yield Problem(field, "spans overlap or are out of order")
        return
    covered = [0] * len(segment.response)
    for start, end, _ in segment.versions:
        covered[start:end] = [1] * len(covered[start:end])
    if covered != segment.mask or (segment.versions and segment.versions[-1][1] != len(covered)):
        yield Problem(field, "do not cover exactly the sampled ids")


def _check_calls(segments: Sequence[_Segment], records: Sequence[LedgerRecord]) -> Iterator[Problem]:
    for at, record in enumerate(records):
        if record.call != at:
            yield Problem(f"ledger[{at}].call", f"is {record.call}: calls are missing or out of order")
            return
        if record.segment >= len(segments):
            yield Problem(f"ledger[{at}].segment", f"is {record.segment}, but there are {len(segments)} segments")
            return
    for index, segment in enumerate(segments):
        yield from _check_segment(segment, [record for record in records if record.segment == index])


def _check_segment(segment: _Segment, records: Sequence[LedgerRecord]) -> Iterator[Problem]:
    """One segment against the calls that made it, up to the first contradiction."""
    if segment.num_turns != len(records):
        yield Problem(f"{segment.field}.num_turns", f"is {segment.num_turns}, the ledger has {len(records)} calls")
        return
    ids, base = segment.ids, len(segment.prompt)
    mask = [0] * len(segment.response)
    versions: list[Span] = []
    digest: str | None = None
    end = 0
    for record in records:
        field = f"ledger[{record.call}]"
        start = record.prompt_tokens
        last = start + len(record.output_ids)
        if record.agent != segment.agent:
            yield Problem(f"{field}.agent", f"is {record.agent!r}, its segment belongs to {segment.agent!r}")
            return
        if start != end + record.new_prompt_tokens or (end == 0 and start != base):
            yield Problem(f"{field}.prompt_tokens", f"is {start}, which does not continue the {end} ids before it")
            return
        if ids[start:last] != record.output_ids:
            at = next(
                (i for i, (a, b) in enumerate(zip(ids[start:last], record.output_ids, strict=False)) if a != b), 0
            )
            yield Problem(
                f"{field}.output_ids[{at}]", f"differs from {segment.field}.response_ids[{start - base + at}]"
            )
            return
        if segment.logprobs[start - base : last - base] != record.logprobs:
            yield Problem(f"{field}.logprobs", f"differ from {segment.field}.logprobs[{start - base}:{last - base}]")
        digest = chain(digest, ids[end:start], record.output_ids)
        if digest != record.digest:
            yield Problem(f"{field}.digest", "does not fit the prompt and the sampled ids")
            return
        mask[start - base : last - base] = [1] * (last - start)
        versions.extend((start - base + span[0], start - base + span[1], span[2]) for span in record.versions)
        end = last
    if end != len(ids):
        yield Problem(f"{segment.field}.response_ids", f"holds {len(ids) - end} ids that no call accounts for")
    if mask != segment.mask:
        at = next(i for i, (a, b) in enumerate(zip(mask, segment.mask, strict=True)) if a != b)
        yield Problem(f"{segment.field}.response_mask[{at}]", f"is {segment.mask[at]}, the ledger says {mask[at]}")
    if versions != segment.versions:
        yield Problem(f"{segment.field}.versions", "differ from the versions in the ledger")


def _check_policy_versions(told: object, segments: Sequence[_Segment]) -> Iterator[Problem]:
    if not isinstance(told, Mapping):
        return
    seen = [span[2] for segment in segments for span in segment.versions if span[2] is not None]
    expected = {"min": min(seen, default=None), "max": max(seen, default=None)}
    if {key: told.get(key) for key in expected} != expected:
        yield Problem("policy_versions", f"is {dict(told)!r}, the segments say {expected!r}")


def _check_messages(
    messages: Sequence[Any], segments: Sequence[_Segment], records: Sequence[LedgerRecord]
) -> Iterator[Problem]:
    """The ids of messages against segments and calls, where messages carry ids at all."""
    told: dict[int, list[int]] = {}
    sampled = []
    for at, message in enumerate(messages):
        field = f"messages[{at}]"
        if not isinstance(message, Mapping):
            raise _Broken(field, "is no object")
        if message.get("token_ids") is None:
            continue
        index = message.get("segment")
        if type(index) is not int or not 0 <= index < len(segments):
            raise _Broken(f"{field}.segment", f"is {index!r}, but there are {len(segments)} segments")
        told.setdefault(index, []).extend(_ids(message, "token_ids", field))
        if message.get("output_ids") is not None:
            sampled.append((field, message))
    if not told:
        return
    if len(sampled) != len(records):
        yield Problem("messages", f"hold {len(sampled)} sampled turns, the ledger {len(records)} calls")
        return
    for (field, message), record in zip(sampled, records, strict=True):
        yield from _check_turn(field, message, record, segments)
    seen: set[str] = set()
    for index, segment in enumerate(segments):
        ids = told.get(index, [])
        first, whole = segment.agent not in seen, segment.ids
        seen.add(segment.agent)
        if ids != whole if first else ids != whole[len(whole) - len(ids) :] or len(ids) < len(segment.response):
            yield Problem("messages", f"their token_ids, one after the other, are not {segment.field}")


def _check_turn(
    field: str, message: Mapping[str, Any], record: LedgerRecord, segments: Sequence[_Segment]
) -> Iterator[Problem]:
    if message.get("segment") != record.segment:
        yield Problem(f"{field}.segment", f"is {message.get('segment')!r}, call {record.call} is in {record.segment}")
        return
    prompt = segments[record.segment].ids[: record.prompt_tokens]
    for key, expected in (
        ("output_ids", record.output_ids),
        ("token_ids", record.output_ids),
        ("input_ids", prompt),
        ("logprobs", record.logprobs),
    ):
        if message.get(key) != expected:
            yield Problem(f"{field}.{key}", f"differ from call {record.call} of the ledger")
