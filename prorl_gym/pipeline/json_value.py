"""Anything a handler or a model produced, as a value that every JSON encoder takes."""

import base64
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from prorl_gym.tokens.body import without_surrogates

MAX_DEPTH = 64
_LONGEST_REPR = 1000
_SCALARS = (str, int, float, bytes, bytearray, type(None))


def json_safe(value: Any, depth: int = 0) -> Any:
    """A copy of `value` in JSON's own types.

    Non-finite floats become null, lone surrogates U+FFFD, integers beyond 64 bits strings, bytes text or base64, tuples
    and sets lists; nesting deeper than `MAX_DEPTH`, so also a cycle, and foreign objects become their description.
    """
    if isinstance(value, _SCALARS):
        return _scalar(value)
    if depth >= MAX_DEPTH:
        return "<nested too deeply>"
    if isinstance(value, Mapping):
        return {without_surrogates(str(key)): json_safe(item, depth + 1) for key, item in list(value.items())}
    if isinstance(value, list | tuple | AbstractSet):
        return [json_safe(item, depth + 1) for item in list(value)]
    as_list = getattr(value, "tolist", None)  # numpy and torch, without importing either
    return json_safe(as_list(), depth + 1) if callable(as_list) else described(value)


def _scalar(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return without_surrogates(str(value))
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return bytes_value(bytes(value))


def bytes_value(content: bytes) -> str | dict[str, str]:
    """Text where the bytes are UTF-8, else `{"base64": ...}`."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def described(value: object) -> str:
    """A short text for something that has no JSON form, whatever its own `repr` does."""
    try:
        return without_surrogates(repr(value)[:_LONGEST_REPR])
    except Exception:  # noqa: BLE001 - a foreign __repr__
        return f"<{type(value).__name__}>"
