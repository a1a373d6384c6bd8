"""The cache: which slot a prompt gets, what it finds there, and what it costs."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from prorl_gym.embedded.kv_slots import KVSlots, ModelShape

SHAPE = ModelShape(layers=1, kv_heads=1, head_dim=2)


def cache(slots: int, shape: ModelShape = SHAPE) -> KVSlots:
    return KVSlots(shape, slots, max_len=8192, dtype=torch.float32, device=torch.device("cpu"))


def fill(slots: KVSlots, prompt: list[int]) -> int:
    """Begin, 'compute' and end a sequence; every key is its token."""
    slot, reused = slots.begin(prompt)
    slots.reserve(len(prompt))
    slots.keys[0][slot, 0, reused : len(prompt), 0] = torch.tensor(prompt[reused:], dtype=torch.float32)
    slots.extend(slot, prompt[reused:])
    slots.release(slot)
    return slot


def keys(slots: KVSlots, slot: int, count: int) -> list[int]:
    return [int(value) for value in slots.keys[0][slot, 0, :count, 0].tolist()]


def test_a_longer_prompt_continues_in_the_slot_of_its_beginning() -> None:
    slots = cache(3)
    first = fill(slots, list(range(100)))
    fill(slots, [7, 7, 7])
    assert slots.begin([*range(100), 5, 6]) == (first, 100)


def test_a_shared_beginning_is_copied_and_the_long_conversation_kept() -> None:
    slots = cache(3)
    conversation = list(range(400))
    owner = fill(slots, conversation)
    slot, reused = slots.begin([*range(50), 9, 9])
    assert slot != owner
    assert (reused, keys(slots, slot, 50)) == (50, conversation[:50])
    assert slots.begin([*conversation, 1]) == (owner, 400)


def test_the_least_recently_used_slot_is_given_up_first() -> None:
    slots = cache(2)
    old, new = fill(slots, [1] * 20), fill(slots, [2] * 20)
    assert slots.begin([3, 3])[0] == old
    assert slots.begin([2] * 20) == (new, 19)


def test_growing_keeps_what_was_computed_and_takes_memory_only_for_what_is_written() -> None:
    wide = ModelShape(layers=8, kv_heads=8, head_dim=64)
    before = resident_bytes()
    slots = cache(16, wide)
    prompt = list(range(200))
    slot = fill(slots, prompt)
    slots.reserve(8192)
    assert sum(t.nbytes for t in (*slots.keys, *slots.values)) == 2**32
    assert keys(slots, slot, 200) == prompt
    assert resident_bytes() - before < 2**26


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
