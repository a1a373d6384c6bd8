"""The ledger: one record per model call, chained by digest so that a rollout file can be checked offline.

The chain of a segment starts anew with it, so equal token histories have equal digests, whoever made them.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

LOGPROB_TOLERANCE = 1e-3
"""A log-probability may exceed 0 by this much: engines round in float16 and below."""


def chain(previous: str | None, new_prompt_ids: Iterable[int], output_ids: Iterable[int]) -> str:
    """Digest of a call: sha256 over the digest of the segment's call before, the new prompt ids and the sampled ids.

    Both runs of ids are preceded by their count, so the digest also says which of them were sampled. Counts and ids are
    unsigned 32-bit little-endian numbers. The cost depends on the new ids alone.

    Args:
        previous: Digest of the call before in the same segment; None for the first.
        new_prompt_ids: [N] what the prompt has beyond that call's prompt and sampled ids.
        output_ids: [T] what this call sampled.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256(b"" if previous is None else bytes.fromhex(previous))
    for ids in (new_prompt_ids, output_ids):
        packed = array("I", ids)
        packed.insert(0, len(packed))
        if sys.byteorder == "big":
            packed.byteswap()
        digest.update(packed.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """What of a call's record the digests and segments can be checked against; times and backends are notes beside it.

    Attributes:
        call: Number of the call within the episode, from 0.
        segment: Index of its segment.
        prompt_tokens: Length of the whole prompt.
        new_prompt_tokens: Of those, how many come after the prompt and the sampled ids of the segment's call before.
        output_ids: [T] sampled ids.
        logprobs: [T] natural log, of the distribution sampled from.
        versions: Spans `(start, end, version)` that cover `output_ids` without gaps.
        digest: See `chain`.
    """

    call: int
    agent: str
    segment: int
    prompt_tokens: int
    new_prompt_tokens: int
    output_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int, int | None]]
    digest: str
