"""A chat renderer that needs no files: the ids of `ByteTokenizer` and the chat template of the tiny model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from prorl_gym.testing.byte_tokenizer import ENDOFTEXT_ID, IM_END_ID, IM_START_ID
from prorl_gym.testing.tiny_model import CHAT_TEMPLATE
from prorl_gym.tokens.body import ControlToken, Vocabulary
from prorl_gym.tokens.chat_template import ChatTemplate
from prorl_gym.tokens.proof import make_template_renderer
from prorl_gym.tokens.template import TemplateRenderer

_CONTROL = {IM_START_ID: "<|im_start|>", IM_END_ID: "<|im_end|>", ENDOFTEXT_ID: "<|endoftext|>"}


class _Bytes:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]] | None:
        return self.encode(text), [at for at, character in enumerate(text) for _ in character.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = (_CONTROL[i].encode() if i in _CONTROL else bytes([i]) for i in ids if 0 <= i <= ENDOFTEXT_ID)
        return b"".join(pieces).decode("utf-8", "replace")

    def digest(self) -> str:
        return hashlib.sha256(b"one token per byte").hexdigest()


def byte_renderer(
    chat_template: str = CHAT_TEMPLATE,
    *,
    calls: Literal["auto", "hermes", "fenced"] = "auto",
    keep_thinking: bool = False,
) -> TemplateRenderer:
    """A proven renderer for `ScriptedLlm` and the tiny model, made without transformers.

    Raises:
        ConfigError: The template is another one and cannot be proven.
    """
    return make_template_renderer(
        Vocabulary(_Bytes(), [ControlToken(id_, text) for id_, text in _CONTROL.items()]),
        ChatTemplate(chat_template, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
        calls=calls,
        stop_token_ids=(IM_END_ID, ENDOFTEXT_ID),
        keep_thinking=keep_thinking,
    )
