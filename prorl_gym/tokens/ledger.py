"""The ledger: one record per model call, chained by digest so that a rollout file can be checked offline.

The chain of a segment starts anew with it, so equal token histories have equal digests, whoever made them.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable

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
