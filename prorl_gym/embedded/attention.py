"""Attention over slots for a packed batch: all new tokens of all sequences in one row, decoding and prefill mixed.

The model sees `input_ids [1, T]` with explicit positions; linear layers run once over all T tokens. Only attention
knows of sequences: it writes the new keys and values into the slots (`kv_slots.KVSlots`) and lets each token read its
own sequence's positions, none of another's. transformers passes the step's plan through the model as the keyword
`packed_step`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from prorl_gym.embedded.kv_slots import KVSlots

NAME = "prorl_gym_packed"

#: One padded call for all decoding rows beats a call per row while padding costs no more than this (measured: 10 to
#: 20 % faster at equal lengths on 2 cores).
MAX_PADDING = 1.3


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: tokens `begin:end` of the packed row go to `slot` from position `start` on."""

    slot: int
    start: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        """Positions in the slot after this step."""
        return self.start + self.end - self.begin


class PackedStep:
    """Everything the layers share in one forward pass: where tokens go, and the masks.

    rows: decoding rows (one token each) first, then prefill rows, without gaps in the packed order.
    """

    def __init__(self, rows: Seq[Row], cache: KVSlots, device: torch.device) -> None:
        self.cache = cache
        self.slots = torch.tensor([r.slot for r in rows for _ in range(r.end - r.begin)], device=device)
        self.positions = torch.tensor([p for r in rows for p in range(r.start, r.length)], device=device)
        decoding = [r for r in rows if r.end - r.begin == 1]
        self.padded = decoding if _pays_off(decoding, device) else []
        self.single = [r for r in rows if r.end - r.begin > 1 or not self.padded]
        self.single_masks = [_prefix_mask(r, device) for r in self.single]
        if self.padded:
            self.padded_length = max(r.length for r in self.padded)
            lengths = torch.tensor([r.length for r in self.padded], device=device)
            self.padded_mask = torch.arange(self.padded_length, device=device)[None] < lengths[:, None]
            self.padded_slots = _slot_index([r.slot for r in self.padded], device)


def _pays_off(decoding: Seq[Row], device: torch.device) -> bool:
    if len(decoding) < 2:
        return False
    if device.type != "cpu":
        return True  # launches cost more than the copies and the padding
    # On a CPU only if the slots are a view, in order, with little padding: a gathered copy costs more than it saves.
    slots = [r.slot for r in decoding]
    padded = len(decoding) * max(r.length for r in decoding)
    return slots == list(range(slots[0], slots[-1] + 1)) and padded <= MAX_PADDING * sum(r.length for r in decoding)


def _slot_index(slots: list[int], device: torch.device) -> slice | torch.Tensor:
    if slots == list(range(slots[0], slots[-1] + 1)):
        return slice(slots[0], slots[-1] + 1)
    return torch.tensor(slots, device=device)


def _prefix_mask(row: Row, device: torch.device) -> torch.Tensor | None:
    """[new, length] of bool for new tokens behind a known prefix; None where causal or a single token needs no mask."""
    count = row.end - row.begin
    if row.start == 0 or count == 1:
        return None
    return torch.ones(count, row.length, dtype=torch.bool, device=device).tril_(diagonal=row.start)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packed_step: PackedStep | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend, as transformers calls it. query: [1, Q, T, D]; key, value: [1, K, T, D]; returns [1, T, Q, D]."""
    if packed_step is None:
        raise ValueError("the packed attention needs packed_step: run the model through the embedded engine")
    step = packed_step
    keys, values = step.cache.keys[module.layer_idx], step.cache.values[module.layer_idx]
    keys[step.slots, :, step.positions] = key[0].transpose(0, 1)
    values[step.slots, :, step.positions] = value[0].transpose(0, 1)
    queries = query[0].transpose(0, 1)  # [T, Q, D]
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    if step.padded:
        index, length, count = step.padded_slots, step.padded_length, len(step.padded)
        grouped = queries[:count].reshape(count, keys.shape[1], -1, keys.shape[3])
        mask = step.padded_mask[:, None, None]
        found = scaled_dot_product_attention(
            grouped, keys[index, :, :length], values[index, :, :length], attn_mask=mask, scale=scaling
        )
        out[:count] = found.reshape(count, *queries.shape[1:])
    for row, mask in zip(step.single, step.single_masks, strict=True):
        out[row.begin : row.end] = _attend_row(queries[row.begin : row.end], keys, values, row, mask, scaling)
    return out[None], None


def _attend_row(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row: Row,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of one sequence over its own slot. queries and result: [new, Q, D]."""
    key, value = keys[row.slot, :, : row.length], values[row.slot, :, : row.length]
    count, heads, dim = queries.shape
    if count == 1:
        # Query heads of one key head become its query positions: nothing is repeated.
        found = scaled_dot_product_attention(
            queries.reshape(1, key.shape[0], -1, dim), key[None], value[None], scale=scaling
        )
        return found.reshape(1, heads, dim)
    repeats = heads // key.shape[0]
    found = scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        key.repeat_interleave(repeats, dim=0)[None],
        value.repeat_interleave(repeats, dim=0)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    return found[0].transpose(0, 1)


def register() -> None:
    """Make the attention known to transformers under `NAME`; a second call is harmless."""
    AttentionInterface.register(NAME, packed_attention)
