"""Message bodies as token ids: whatever a text looks like, no control token comes of it.

A chat template mixes bodies with its own frame in one string. `Vocabulary.guard` marks a body before it goes in, so
that afterwards control text is the frame's own exactly where it stands unbroken. Marks are made of characters that
Unicode reserves for such use inside a program; they are gone before the text is encoded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

_ESCAPE, _LITERAL, _BREAK = "\ufdd0", "\ufdd1", "\ufdd2"
_MARK = _ESCAPE + _BREAK
_MARKS = re.compile(f"{_ESCAPE}([{_LITERAL}{_BREAK}])")
_CHARACTERS_PER_TOKEN = 16
"""Text beyond this many characters per allowed token is cut off before it is encoded."""

_MAX_SCHEMAS = 1000
"""Guarded schemas that are kept; tasks may bring tools of their own."""


def without_surrogates(text: str) -> str:
    """`text` with each lone surrogate replaced by U+FFFD; the same object when it has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
    return text


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that only a frame may write; `lstrip` and `rstrip` say that it swallows the white space beside it."""

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False


class PlainEncoder(Protocol):
    """A tokenizer that knows no control token at all."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added."""
        ...

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]] | None:
        """Ids and the character at which each begins; None where the tokenizer cannot tell."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids, control tokens as they are written; ids out of range are left out."""
        ...

    def digest(self) -> str:
        """Hash of all that decides which ids a text gets."""
        ...


class Vocabulary:
    """One tokenizer with two ways in: frames, whose control text counts, and bodies, in which nothing does."""

    def __init__(self, plain: PlainEncoder, control: Sequence[ControlToken]) -> None:
        """Single characters and white space cannot be broken up and are left to `plain`."""
        self._plain = plain
        self.control: Mapping[str, ControlToken] = {
            token.text: token for token in control if len(token.text) > 1 and token.text.strip()
        }
        self._schemas: dict[bytes, Any] = {}
        self._lengths: dict[str, list[int]] = {}
        for length, beginning in sorted({(len(text), text[:2]) for text in self.control}, reverse=True):
            self._lengths.setdefault(beginning, []).append(length)
        first = "".join(re.escape(character) for character in sorted({text[0] for text in self.control}))
        self._may_begin = re.compile(f"[{first}]" if first else r"(?!)")

    def leaks(self) -> list[str]:
        """Control texts that become control tokens even in a body; a tokenizer with any is not safe to use."""
        ids = {token.id for token in self.control.values()}
        return [text for text in self.control if not ids.isdisjoint(self._plain.encode(text))]

    def digest(self) -> str:
        """See `PlainEncoder.digest`."""
        return self._plain.digest()

    def guard(self, body: str) -> str:
        """Mark a body so that no control text in it, or across its edges, counts in `encode`.

        Lone surrogates become U+FFFD. White space at both ends stays where templates look for it.
        """
        guarded = self._guard_within(without_surrogates(body))
        core = guarded.strip()
        if not core:
            return guarded
        start = guarded.index(core)
        return guarded[:start] + _MARK + core + _MARK + guarded[start + len(core) :]

    def guard_json(self, value: Any) -> Any:
        """A copy of a JSON value whose strings, keys included, are marked; their edges are safe between quotes."""
        if isinstance(value, str):
            return self._guard_within(without_surrogates(value))
        if isinstance(value, Mapping):
            return {self.guard_json(key): self.guard_json(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard_json(item) for item in value]
        return value

    def guard_schema(self, schema: Mapping[str, Any]) -> Any:
        """As `guard_json`, for a tool's schema, which comes with every prompt: the copy is shared, to be read only."""
        try:
            key = orjson.dumps(schema)
        except TypeError:  # lone surrogates
            return self.guard_json(schema)
        guarded = self._schemas.get(key)
        if guarded is None:
            if len(self._schemas) >= _MAX_SCHEMAS:
                self._schemas.clear()
            guarded = self._schemas[key] = self.guard_json(schema)
        return guarded

    def encode(self, text: str) -> list[int]:
        """Ids of a frame with guarded bodies in it."""
        return self.encode_at(text, ())[0]

    def encode_at(self, text: str, edges: Sequence[int]) -> tuple[list[int], list[int] | None]:
        """Ids of a frame with guarded bodies, and which of them come first at or after some characters.

        Args:
            text: Frame and bodies.
            edges: Ascending character positions in `text`, none inside control text.

        Returns:
            The ids, and one position in them per edge; None when the tokenizer cannot tell.
        """
        ids: list[int] = []
        found: list[int] | None = []
        at = 0
        swallow = False
        for start, token in [*self._find_control(text), (len(text), None)]:
            inside = [edge for edge in edges if at <= edge < start] if found is not None else []
            stretch, positions = self._encode_stretch(
                text[at:start], [edge - at for edge in inside], swallow, token is not None and token.lstrip
            )
            if found is not None:
                found = None if positions is None else found + [len(ids) + position for position in positions]
            ids.extend(stretch)
            at = start
            if token is None:
                break
            if found is not None:
                found += [len(ids)] * sum(start <= edge < start + len(token.text) for edge in edges)
            ids.append(token.id)
            at += len(token.text)
            swallow = token.rstrip
        if found is not None:
            found += [len(ids)] * (len(edges) - len(found))
        return ids, found

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids, control tokens as they are written. Never raises."""
        return self._plain.decode(ids)

    def count_tokens(self, text: str) -> int:
        """Tokens of `text` as a body."""
        return len(self._plain.encode(without_surrogates(text)))

    def clip(self, text: str, max_tokens: int) -> str:
        """The longest head and tail of `text` that fit `max_tokens` together with a note of what lies between."""
        text = without_surrogates(text)
        if max_tokens <= 0:
            return ""
        reach = max_tokens * _CHARACTERS_PER_TOKEN
        if len(text) <= 2 * reach:
            if self.count_tokens(text) <= max_tokens:
                return text
            head_starts = tail_starts = self._starts(text)
            tail_text = text
        else:
            head_starts, tail_text = self._starts(text[:reach]), text[-reach:]
            tail_starts = self._starts(tail_text)
        budget = max_tokens
        while budget > 0:
            head, tail = (budget + 1) // 2, budget // 2
            head_end = head_starts[head] if head < len(head_starts) else reach
            tail_length = len(tail_text) - (tail_starts[-tail] if tail <= len(tail_starts) else 0) if tail else 0
            omitted = len(text) - head_end - tail_length
            clipped = f"{text[:head_end]}\n[... {omitted} characters left out ...]\n{text[len(text) - tail_length :]}"
            excess = self.count_tokens(clipped) - max_tokens
            if excess <= 0:
                return clipped
            budget -= excess
        return self._head(text[:reach], max_tokens)

    def _head(self, text: str, max_tokens: int) -> str:
        """A head alone, for a budget in which the note has no room."""
        starts = self._starts(text)
        for count in range(min(max_tokens, len(starts)), 0, -1):
            head = text[: starts[count]] if count < len(starts) else text
            if self.count_tokens(head) <= max_tokens:
                return head
        return ""

    def _starts(self, text: str) -> list[int]:
        """The character at which each token of `text` begins; one entry per character where that is unknown."""
        told = self._plain.encode_with_starts(text)
        return list(range(len(text))) if told is None else told[1]

    def _match(self, text: str, at: int) -> str | None:
        for length in self._lengths.get(text[at : at + 2], ()):
            if (candidate := text[at : at + length]) in self.control:
                return candidate
        return None

    def _find_control(self, text: str) -> list[tuple[int, ControlToken]]:
        """Control text that stands unbroken, leftmost first and the longest at each place."""
        found = []
        at = 0
        while begin := self._may_begin.search(text, at):
            match = self._match(text, begin.start())
            if match is None:
                at = begin.start() + 1
                continue
            found.append((begin.start(), self.control[match]))
            at = begin.start() + len(match)
        return found

    def _guard_within(self, text: str) -> str:
        text = text.replace(_ESCAPE, _ESCAPE + _LITERAL)
        parts = []
        at = 0
        for begin in self._may_begin.finditer(text):
            if self._match(text, begin.start()) is not None:
                parts.append(text[at : begin.end()])
                at = begin.end()
        return _MARK.join([*parts, text[at:]])

    def _encode_stretch(
        self, marked: str, edges: Sequence[int], lstrip: bool, rstrip: bool
    ) -> tuple[list[int], list[int] | None]:
        text = _unmarked(marked)
        offset = 0
        if lstrip:
            offset = len(text) - len(text.lstrip())
            text = text[offset:]
        if rstrip:
            text = text.rstrip()
        if not edges:
            return (self._plain.encode(text) if text else []), []
        places = [len(_unmarked(marked[:edge])) - offset for edge in edges]
        if places[-1] <= 0:
            return (self._plain.encode(text) if text else []), [0] * len(places)
        told = self._plain.encode_with_starts(text)
        if told is None:
            return self._plain.encode(text), None
        ids, starts = told
        return ids, [next((i for i, start in enumerate(starts) if start >= place), len(ids)) for place in places]


def _unmarked(text: str) -> str:
    if _ESCAPE not in text:
        return text
    return _MARKS.sub(lambda mark: _ESCAPE if mark[1] == _LITERAL else "", text)
