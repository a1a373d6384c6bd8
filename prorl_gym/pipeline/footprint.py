"""How much memory a finished job keeps, estimated in microseconds whatever its size."""

import sys
from collections.abc import Iterable, Mapping, Set
from itertools import chain, islice

from prorl_gym.pipeline.outcome import Outcome
from prorl_gym.tokens.trajectory import Trajectory

JOB_BYTES = 8_000
"""Ticket, request, outcome and the events that every job has."""
CALL_BYTES = 1_000
"""What is kept of a model call beside its tokens; measured, as the next one."""
ENTRY_BYTES = 400
"""What is kept of a message beside its texts."""
LOOKS = 512
"""Elements of one value that are looked at; the others are taken to be like them."""
MAX_DEPTH = 8
"""What lies deeper is not counted."""


def footprint(outcome: Outcome) -> int:
    """Bytes that keeping this outcome costs, within a factor of two for what jobs are made of.

    What many jobs share, tool schemas say, is not counted.
    """
    own = (outcome.request.instance, outcome.artifacts, outcome.score.components, outcome.provenance)
    texts = sum(map(sys.getsizeof, (outcome.git_patch, *outcome.warnings)))
    return JOB_BYTES + texts + sum(map(value_bytes, own)) + trajectory_bytes(outcome.trajectory)


def trajectory_bytes(trajectory: Trajectory) -> int:
    """Bytes of the record of an episode."""
    arrays = (array for part in trajectory.parts for array in (part.ids, part.logprobs))
    total = sum(map(sys.getsizeof, arrays)) + CALL_BYTES * len(trajectory.calls)
    for entry in trajectory.entries:
        message = entry.message
        total += ENTRY_BYTES + sys.getsizeof(message.content) + sys.getsizeof(message.reasoning)
        total += sum(value_bytes(request.arguments) for request in message.tool_requests)
    return total


def value_bytes(value: object, looks: int = LOOKS, depth: int = MAX_DEPTH) -> int:
    """Bytes of a JSON-like value, `looks` of its elements seen, each with its share of further looks."""
    total = sys.getsizeof(value)
    parts: Iterable[object]
    if isinstance(value, Mapping):
        count, parts = 2 * len(value), chain.from_iterable(value.items())
    elif isinstance(value, list | tuple | Set):
        count, parts = len(value), value
    else:
        return total
    seen = min(count, looks)
    if not seen or not depth:
        return total
    share = looks // seen
    return total + sum(value_bytes(part, share, depth - 1) for part in islice(parts, seen)) * count // seen
