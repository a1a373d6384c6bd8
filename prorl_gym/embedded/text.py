"""Text to ids and back, from two threads, and stop strings.

Text is for people and for stop strings only; what counts for training are the ids, which never pass through here twice.
"""

from __future__ import annotations

import threading
from typing import Any

#: Ids decoded before the new ones when looking for a stop string: enough for a token that needs its left neighbours.
CONTEXT_IDS = 6


class TextCodec:
    """A transformers tokenizer behind a lock: fast tokenizers refuse calls from two threads at once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; control tokens written in it become control tokens, as in vLLM."""
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; incomplete UTF-8 becomes U+FFFD."""
        with self._lock:
            text: str = self._tokenizer.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        variables: dict[str, Any] | None,
    ) -> list[int]:
        """Ids of a conversation by the model's chat template.

        Args:
            messages: As the template takes them.
            tools: Likewise.
            add_generation_prompt: Whether the assistant's turn is opened at the end.
            variables: More of the template's variables, such as `enable_thinking`.

        Raises:
            ValueError: There is no chat template, or it refuses the messages.
        """
        with self._lock:
            try:
                ids = self._tokenizer.apply_chat_template(
                    messages,
                    tools,
                    **(variables or {}),
                    add_generation_prompt=add_generation_prompt,
                    tokenize=True,
                    return_dict=False,
                )
            except Exception as error:
                raise ValueError(f"the chat template refused them: {error}") from error
        return list(ids)


def find_stop(codec: TextCodec, output_ids: list[int], stop: tuple[str, ...]) -> tuple[str, str] | None:
    """Look for a stop string that the last id of `output_ids` completed.

    Returns:
        The stop string that begins first, and the text before it; None if there is none.
    """
    # An id may stand for a single byte.
    longest = max(len(s.encode()) for s in stop)
    tail = codec.decode(output_ids[-(longest + CONTEXT_IDS) :])
    if not any(s in tail for s in stop):
        return None
    text = codec.decode(output_ids)
    found = [(text.find(s), s) for s in stop if s in text]
    if not found:
        return None
    position, string = min(found)
    return string, text[:position]
