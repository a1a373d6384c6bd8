"""A tokenizer that needs no files: one token per UTF-8 byte, plus the ChatML control tokens.

Ids 0 to 255 are the bytes themselves. `encode` never produces a control id from text, so hostile text stays text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

IM_START_ID = 256
IM_END_ID = 257
ENDOFTEXT_ID = 258


class Tokenizer(Protocol):
    """What the scripted server asks of a tokenizer; those of transformers and `tokenizers` fit too.

    An `eos_token_id` attribute, where there is one, is the end-of-turn id.
    """

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids."""
        ...


class ByteTokenizer:
    """One token per byte; `<|im_start|>`, `<|im_end|>` and `<|endoftext|>` are ids 256, 257 and 258."""

    vocab_size = 259
    bos_token_id = None
    eos_token_id = IM_END_ID
    pad_token_id = ENDOFTEXT_ID

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the UTF-8 bytes as ids; a lone surrogate becomes a question mark. No special token is ever added."""
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the byte ids; bytes that are no UTF-8 become U+FFFD, control ids are left out."""
        return bytes(i for i in ids if i < IM_START_ID).decode("utf-8", "replace")
