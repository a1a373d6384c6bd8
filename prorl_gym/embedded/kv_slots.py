"""Keys and values of every sequence, one slot each, kept after its end so that a longer prompt can build on them.

Invariant: slot `i` holds valid keys and values for exactly `tokens[i]`, from position 0 on. Whoever writes behind that
list first shortens it (`begin`), and extends it only after the model has run (`extend`).
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass

import torch

#: A prompt that continues less than this part of what a free slot holds gets a copy, so that a long conversation is not
#: thrown away for a prompt that only shares its system message.
KEEP_FRACTION = 0.5
MIN_CAPACITY = 256


def common_prefix(left: list[int], right: list[int]) -> int:
    """Length of the common prefix of two id lists."""
    limit = min(len(left), len(right))
    start = 0
    # Whole blocks are compared in C; prompts of one conversation share thousands of ids.
    while start + 64 <= limit and left[start : start + 64] == right[start : start + 64]:
        start += 64
    while start < limit and left[start] == right[start]:
        start += 1
    return start


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a cache must know of a model: layers, key/value heads, head dimension (keys and values alike)."""

    layers: int
    kv_heads: int
    head_dim: int


class KVSlots:
    """`[slots, kv_heads, capacity, head_dim]` per layer for keys and for values; capacity doubles when needed.

    On a CPU untouched pages cost no memory, so capacity is bounded by the longest sequence seen, memory by what was
    really written. Used by the engine thread only.
    """

    def __init__(self, shape: ModelShape, slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._slots, self._max_len = shape, slots, max_len
        self._dtype, self._device = dtype, device
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self._free: list[int] = list(range(slots))  # least recently used first
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._capacity = 0
        self._grow(min(MIN_CAPACITY, max_len))

    @property
    def free(self) -> int:
        """How many sequences can be started now."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of slots in use, 0 to 1."""
        return 1.0 - len(self._free) / self._slots

    def cached(self, prompt_ids: list[int]) -> int:
        """How many tokens `begin` could reuse now; the last prompt token is always computed, for its logits."""
        return max(self._reusable(prompt_ids, slot) for slot in range(self._slots))

    def begin(self, prompt_ids: list[int]) -> tuple[int, int]:
        """Take a free slot, with the longest known prefix of `prompt_ids` in it.

        Returns:
            The slot and the number of tokens whose keys and values it already holds.

        Raises:
            IndexError: No slot is free.
        """
        source = max(range(self._slots), key=lambda slot: self._reusable(prompt_ids, slot))
        reused = self._reusable(prompt_ids, source)
        if source in self._free and reused >= KEEP_FRACTION * len(self.tokens[source]):
            slot = source
        else:
            # An empty slot first, then the least recently used one.
            slot = next((i for i in self._free if not self.tokens[i]), self._free[0])
        self._free.remove(slot)
        if slot != source:
            for tensors in (self.keys, self.values):
                for layer in tensors:
                    layer[slot, :, :reused] = layer[source, :, :reused]
        self.tokens[slot] = prompt_ids[:reused]
        return slot, reused

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens.

        Raises:
            ValueError: Longer than the maximum given at construction.
        """
        if length > self._max_len:
            raise ValueError(f"a sequence of {length} tokens exceeds max_len={self._max_len}")
        if length > self._capacity:
            self._grow(min(max(length, 2 * self._capacity), self._max_len))

    def extend(self, slot: int, token_ids: list[int]) -> None:
        """Note that keys and values for these tokens were written behind the known ones."""
        self.tokens[slot].extend(token_ids)

    def release(self, slot: int) -> None:
        """Give a slot back; what it holds stays reusable until the slot is taken again."""
        self._free.append(slot)

    def wipe(self, slot: int) -> None:
        """Clear a slot for good, so that a NaN in it cannot reach its next owner; give it back with `release`."""
        self.tokens[slot] = []
        for tensors in (self.keys, self.values):
            for layer in tensors:
                layer[slot].zero_()

    def forget(self) -> None:
        """Drop all reusable content: the weights changed, or a step failed half way."""
        for tokens in self.tokens:
            tokens.clear()

    def _reusable(self, prompt_ids: list[int], slot: int) -> int:
        return min(common_prefix(prompt_ids, self.tokens[slot]), len(prompt_ids) - 1)

    def _grow(self, capacity: int) -> None:
        size = (self._slots, self._shape.kv_heads, capacity, self._shape.head_dim)
        if not self.keys:
            self.keys = [lazy_zeros(size, self._dtype, self._device) for _ in range(self._shape.layers)]
            self.values = [lazy_zeros(size, self._dtype, self._device) for _ in range(self._shape.layers)]
        else:
            for tensors in (self.keys, self.values):
                for layer, old in enumerate(tensors):
                    tensors[layer] = self._grown(old, size)
        self._capacity = capacity

    def _grown(self, old: torch.Tensor, size: tuple[int, int, int, int]) -> torch.Tensor:
        new = lazy_zeros(size, self._dtype, self._device)
        for slot, tokens in enumerate(self.tokens):
            new[slot, :, : len(tokens)] = old[slot, :, : len(tokens)]
        return new


def lazy_zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose pages, on a CPU, take memory only once written.

    Zeros because attention multiplies what it masks by a probability of 0, which garbage that reads as NaN would
    survive. `torch.zeros` writes every page, and numpy asks for huge ones, of which one written byte takes 2 MB.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(size)
