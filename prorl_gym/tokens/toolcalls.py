"""Tool calls as a model writes them: read strictly, never repaired, never run by half.

A call is the JSON object `{"name": ..., "arguments": {...}}`, either between `<tool_call>` tags (`hermes`) or in a
fenced code block (`fenced`). JSON is read from the opening on, so a closing tag or fence inside a string belongs to it.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from prorl_gym.tokens.body import without_surrogates
from prorl_gym.tokens.records import ToolRequest

ToolCallFormat = Literal["hermes", "fenced"]

_FENCE_OPEN = re.compile(r"^[ \t]*```(?:json|tool_call)[ \t]*\r?\n", re.MULTILINE)
_FENCE_CLOSE = re.compile(r"^[ \t]*```[ \t]*$", re.MULTILINE)
_NAME = re.compile(r'"name"\s*:\s*"([^"\\\n]{1,100})"')
_SHOWN = 60
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Calls:
    """What was read out of a turn: the text around the calls, malformed calls included, and the calls in order."""

    content: str
    requests: tuple[ToolRequest, ...]


class _Malformed(ValueError):
    """What is wrong with a call, in words for the model."""


@dataclass(frozen=True, slots=True)
class _Block:
    """One call's place in the text: `[start, end)` with its tags, and either what it says or what is wrong."""

    start: int
    end: int
    name: str
    arguments: dict[str, Any] | None
    error: str | None


def parse_calls(text: str, style: ToolCallFormat, *, complete: bool, turn: int) -> Calls:
    """Read the calls in a turn's text, reasoning already taken off.

    Args:
        text: What the model wrote.
        style: How it was asked to write calls.
        complete: Whether the turn ended with an end-of-turn token. A call whose end was never sampled runs only then.
        turn: Index of the model call within the episode; part of the ids.
    """
    blocks = list(_hermes_blocks(text, complete) if style == "hermes" else _fenced_blocks(text, complete))
    if not blocks:
        return Calls(text, ())
    requests = tuple(
        ToolRequest(f"call_{turn}_{index}", block.name, block.arguments, block.error)
        for index, block in enumerate(blocks)
    )
    kept = []
    at = 0
    for block in blocks:
        kept.append(text[at : block.start])
        if block.error is not None:
            kept.append(text[block.start : block.end])
        at = block.end
    kept.append(text[at:])
    return Calls("\n".join(part.strip() for part in kept if part.strip()), requests)


def format_call(name: str, arguments: Mapping[str, Any], style: ToolCallFormat) -> str:
    """A call the way `parse_calls` reads it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>" if style == "hermes" else f"```json\n{call}\n```"


def check_call(call_id: str, call: Any) -> ToolRequest:
    """A call that somebody else took out of the text: runnable only if it is what `parse_calls` would run."""
    try:
        name, arguments = _checked(call)
    except _Malformed as error:
        written = call.get("name") if isinstance(call, dict) else ""
        return ToolRequest(call_id, written if isinstance(written, str) else "", None, _told(str(error)))
    return ToolRequest(call_id, name, arguments)


def _hermes_blocks(text: str, complete: bool) -> Iterator[_Block]:
    opening, closing = "<tool_call>", "</tool_call>"
    at = 0
    while (start := text.find(opening, at)) >= 0:
        body = start + len(opening)
        try:
            value, end = _decode(text, body)
            rest = text[end:].lstrip()
            tail = len(text) - len(rest)
            if rest.startswith(closing):
                end = tail + len(closing)
            elif rest and not rest.startswith(opening):
                raise _Malformed(f"after the JSON object came {_shown(rest)} instead of {closing}")
            elif not rest and not complete:
                raise _Malformed(f"the turn was cut off before {closing}")
            yield _Block(start, end, *_checked(value), None)
        except (json.JSONDecodeError, _Malformed) as error:
            seen = error.pos if isinstance(error, json.JSONDecodeError) else body
            close, following = text.find(closing, seen), text.find(opening, seen)
            ends = [close + len(closing)] if close >= 0 else []
            end = min([*ends, following] if following >= 0 else [*ends, len(text)])
            yield _malformed(text, start, end, error, cut=end == len(text) and close < 0 and not complete)
        at = end


def _fenced_blocks(text: str, complete: bool) -> Iterator[_Block]:
    """Fenced JSON blocks. One that is no JSON object with a `name` is an ordinary block of text."""
    at = 0
    while fence := _FENCE_OPEN.search(text, at):
        start, body = fence.span()
        try:
            value, end = _decode(text, body)
            close = _FENCE_CLOSE.search(text, end)
            if not isinstance(value, dict) or "name" not in value:
                at = close.end() if close else end
                continue
            between = text[end : close.start() if close else len(text)].strip()
            if between:
                raise _Malformed(f"after the JSON object came {_shown(between)} instead of ```")
            if close is None and not complete:
                raise _Malformed("the turn was cut off before ```")
            at = end = close.end() if close else len(text)
            yield _Block(start, end, *_checked(value), None)
        except (json.JSONDecodeError, _Malformed) as error:
            close = _FENCE_CLOSE.search(text, error.pos if isinstance(error, json.JSONDecodeError) else body)
            at = len(text) if close is None else close.end()
            if _NAME.search(text, start, at):
                yield _malformed(text, start, at, error, cut=close is None and not complete)


def _decode(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at `at`, and where it ends.

    Raises:
        json.JSONDecodeError: There is none; `pos` says how far it went.
        _Malformed: It holds what is no JSON, or more than results can carry.
    """
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise _Malformed("the JSON is nested too deeply") from None


def _checked(value: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call object.

    Raises:
        _Malformed: It is no call.
    """
    if not isinstance(value, dict):
        raise _Malformed(f"a call is a JSON object, not {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _Malformed('"name" must be the name of a tool')
    if "arguments" not in value:
        raise _Malformed('"arguments" is missing; write "arguments": {} for none')
    arguments = value["arguments"]
    if not isinstance(arguments, dict):
        raise _Malformed(f'"arguments" must be a JSON object, not {_kind(arguments)}')
    return without_surrogates(name), {without_surrogates(key): _clean(item, 1) for key, item in arguments.items()}


def _clean(value: Any, depth: int) -> Any:
    """Lone surrogates out of a JSON value; the decoder has joined proper pairs.

    Raises:
        _Malformed: It is nested more deeply than results can carry.
    """
    if depth > _MAX_DEPTH:
        raise _Malformed("the JSON is nested too deeply")
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, list):
        return [_clean(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {without_surrogates(key): _clean(item, depth + 1) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise _Malformed(f"{value} is no JSON number")
    return value


def _malformed(text: str, start: int, end: int, error: ValueError, *, cut: bool) -> _Block:
    name = _NAME.search(text, start, end)
    if cut:
        reason = "it was cut off at the token limit before it was complete"
    elif isinstance(error, json.JSONDecodeError):
        reason = f"invalid JSON: {error.msg} at {_shown(text[error.pos : end])}"
    else:
        reason = str(error)
    return _Block(start, end, name[1] if name else "", None, _told(reason))


def _told(reason: str) -> str:
    return f"This tool call was not run: {reason}."


def _shown(text: str) -> str:
    return repr(text[:_SHOWN] + ("..." if len(text) > _SHOWN else "")) if text else "the end"


def _kind(value: Any) -> str:
    names = {str: "a string", list: "a list", bool: "a boolean", int: "a number", float: "a number", dict: "an object"}
    return names.get(type(value), "null")


def _refuse_constant(constant: str) -> NoReturn:
    raise _Malformed(f"{constant} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _Malformed(f"the number {_shown(digits)} is too large")
    return value


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= len(str(1 << 64)) else None
    if value is None or not -(1 << 63) <= value < 1 << 64:
        raise _Malformed(f"the number {_shown(digits)} does not fit 64 bits; write it as a string")
    return value


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer)
"""Takes raw line breaks inside strings, which are meant as they stand; bad escapes are errors."""
