"""Tokenizers of transformers as a `Vocabulary`: the same merges, without the added tokens that control text becomes."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from prorl_gym.errors import ConfigError
from prorl_gym.tokens.body import ControlToken, Vocabulary

_LONG = 50_000
"""From so many characters on a text is encoded as a batch of one: only then does the library let other threads run."""


class _FastPlain:
    """A tokenizer of the `tokenizers` library; safe to use from several threads."""

    def __init__(self, backend: Any) -> None:
        from tokenizers import Tokenizer

        serialized = backend.to_str()
        self._digest = hashlib.sha256(serialized.encode()).hexdigest()
        settings = json.loads(serialized)
        settings["added_tokens"] = [added for added in settings["added_tokens"] if not _is_control(added["content"])]
        settings["truncation"] = settings["padding"] = None
        self._plain = Tokenizer.from_str(json.dumps(settings))
        self._full = backend

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding(text).ids
        return ids

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]] | None:
        encoding = self._encoding(text)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._full.decode([i for i in ids if 0 <= i < 1 << 32], skip_special_tokens=False)
        return text

    def digest(self) -> str:
        return self._digest

    def _encoding(self, text: str) -> Any:
        if len(text) < _LONG:
            return self._plain.encode(text, add_special_tokens=False)
        return self._plain.encode_batch([text], add_special_tokens=False)[0]


class _SlowPlain:
    """A tokenizer written in Python, which is asked not to look for added tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]] | None:
        return None

    def decode(self, ids: Sequence[int]) -> str:
        size = len(self._tokenizer)
        text: str = self._tokenizer.decode(
            [i for i in ids if 0 <= i < size], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def digest(self) -> str:
        vocabulary = json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        return hashlib.sha256(f"{type(self._tokenizer).__name__} {vocabulary}".encode()).hexdigest()


def load_vocabulary(tokenizer: Any) -> Vocabulary:
    """Wrap a tokenizer of transformers.

    Added tokens that are words of the vocabulary as well, and not special, are ordinary tokens here too.

    Raises:
        ConfigError: It makes control tokens of ordinary text, whatever it is told.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    plain = _SlowPlain(tokenizer) if backend is None else _FastPlain(backend)
    control = [
        ControlToken(id_, added.content, lstrip=added.lstrip, rstrip=added.rstrip)
        for id_, added in tokenizer.added_tokens_decoder.items()
    ]
    special = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special}
    leaks = set(Vocabulary(plain, control).leaks())
    if forged := sorted(leaks & special):
        raise ConfigError(
            f"policy.tokenizer: {type(tokenizer).__name__} turns the plain text {forged[0]!r} into a control token, so "
            "tool output could forge a conversation. Use a model with a tokenizer.json of the `tokenizers` library."
        )
    return Vocabulary(plain, [token for token in control if token.text not in leaks])


def _is_control(text: str) -> bool:
    """What `Vocabulary` breaks up in bodies; the rest stays an ordinary token."""
    return len(text) > 1 and bool(text.strip())


def template_ids(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    *,
    enable_thinking: bool | None = None,
) -> list[int]:
    """The tokenizer's own rendering, generation prompt included: a flat list under every release of transformers."""
    thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    rendered = tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, tokenize=True, add_generation_prompt=True, **thinking
    )
    if hasattr(rendered, "keys"):
        rendered = rendered["input_ids"]
    if hasattr(rendered, "tolist"):
        rendered = rendered.tolist()
    if rendered and isinstance(rendered[0], list | tuple):
        rendered = rendered[0]
    return [int(token) for token in rendered]
