"""JSON on the wire: what comes in is parsed strictly, what goes out always encodes.

In: NaN and Infinity are refused, nesting is bounded by the parser, the last of duplicate keys counts, and a lone
surrogate becomes U+FFFD, as everywhere in a trajectory. Out: whatever a handler put into a result gives valid JSON.
"""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from prorl_gym.errors import RequestError
from prorl_gym.pipeline.json_value import json_safe

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""One escape sequence; group 1 is a surrogate that has no partner."""


def parse_json(raw: bytes) -> Any:
    """Parse a request body.

    Raises:
        RequestError: Malformed, with line and column; or nested too deeply, or with a number that is none.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        repaired = _ESCAPE.sub(lambda match: rb"\ufffd" if match[1] else match[0], raw)
        if repaired == raw:
            raise RequestError(f"malformed JSON: {error}") from None
    return parse_json(repaired)


def encode_json(value: Any) -> bytes:
    """Encode anything. Numbers that are none become null, lone surrogates U+FFFD, foreign objects their text."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(json_safe(value))


def encode_in_pieces(result: Mapping[str, Any]) -> bytes:
    """Encode a job's result list element by list element.

    orjson holds the interpreter while it encodes; in a thread, the event loop gets its turn between two pieces.
    """
    fields = []
    for key, value in result.items():
        if isinstance(value, list):
            encoded = b"[" + b",".join([encode_json(element) for element in value]) + b"]"
        else:
            encoded = encode_json(value)
        fields.append(encode_json(key) + b":" + encoded)
    return b"{" + b",".join(fields) + b"}"
