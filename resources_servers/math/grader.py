r"""Compares a boxed answer with the expected one. Runs in a grader process: everything it sees is hostile text.

The last complete `\boxed{...}` counts. Forms that math-verify confuses are told apart before it is asked: percent
signs, digits with a base, thousands separators.
"""

import logging
import re
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

MAX_ANSWER_CHARACTERS = 2_000
"""A longer content of a box is no answer to anything; parsing it would only cost time."""
SECONDS = 2
"""Of one step inside math-verify (SIGALRM); the pool's own deadline ends what Python cannot interrupt."""

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_BASED = re.compile(r"\(?\s*([0-9A-Za-z]+)\s*\)?\s*_\s*\{?\s*(?:\\text\s*\{)?\s*([0-9A-Za-z]+)\s*\}?\s*\}?")
_PERCENT = re.compile(r"\s*\\?%\s*$")
_THIN_SPACE_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,;:! ]|\{,\}|,\\!)(?=\d{3}(?!\d))")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]|(?<!\\)\$")
_COMMA = re.compile(r",(?=\S)")

logging.disable(logging.CRITICAL)


def grade(request: dict[str, Any]) -> dict[str, Any]:
    """Answer `{answer, expected}` with `{extracted: str | None, correct: bool}`; no answer only tries the expected one.

    Raises:
        ValueError: The expected answer itself cannot be read.
    """
    if request["answer"] is None:
        gold = _tidy(request["expected"])
        return {"extracted": None, "correct": _math_equal(gold, gold)}
    extracted = last_boxed(request["answer"])
    if extracted is None:
        return {"extracted": None, "correct": False}
    if len(extracted) > MAX_ANSWER_CHARACTERS:
        return {"extracted": extracted[:MAX_ANSWER_CHARACTERS], "correct": False}
    expected = last_boxed(request["expected"])
    return {"extracted": extracted, "correct": equal(request["expected"] if expected is None else expected, extracted)}


def last_boxed(text: str) -> str | None:
    r"""The content of the complete `\boxed{...}` that opens last, in one pass over the text."""
    opened: list[int | None] = []
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        mark = match.group()
        if mark.startswith("\\boxed"):
            opened.append(match.end())
        elif mark == "{":
            opened.append(None)
        elif mark == "}" and opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None else text[slice(*last)]


def equal(gold: str, answer: str) -> bool:
    """Whether `answer` says what `gold` says."""
    gold, answer = _tidy(gold), _tidy(answer)
    if not gold:
        raise ValueError("the expected answer is empty")
    if gold == answer:
        return True
    based = _based(gold), _based(answer)
    if any(based):
        return based[0] == based[1]
    if _PERCENT.search(gold) or _PERCENT.search(answer):
        return _equal_percent(gold, answer)
    if _math_equal(gold, answer):
        return True
    if "," in gold and "," in answer:  # `100,200` may be a list as well as a number
        return _math_equal(_COMMA.sub(", ", gold), _COMMA.sub(", ", answer))
    return False


def _tidy(text: str) -> str:
    text = " ".join(_DELIMITERS.sub("", text).replace("\\$", "").split()).rstrip(".").strip()
    return _THIN_SPACE_THOUSANDS.sub("", text)


def _based(text: str) -> tuple[str, str] | None:
    """Digits and base of something like `1011_2`, else None."""
    match = _BASED.fullmatch(text)
    return match and (match.group(1).lstrip("0").upper(), match.group(2).lower())


def _equal_percent(gold: str, answer: str) -> bool:
    r"""With the sign on one side only, both readings count: 0.4 and 40 are each a fair `40\%`."""
    plain_gold, plain_answer = _PERCENT.sub("", gold), _PERCENT.sub("", answer)
    if _math_equal(plain_gold, plain_answer):
        return True
    if plain_gold != gold and plain_answer != answer:
        return False
    if plain_gold != gold:
        return _math_equal(f"\\frac{{{plain_gold}}}{{100}}", answer)
    return _math_equal(gold, f"\\frac{{{plain_answer}}}{{100}}")


def _math_equal(gold: str, answer: str) -> bool:
    targets = [LatexExtractionConfig(boxed_match_priority=-1)]
    parsed_gold = parse(f"${gold}$", targets, parsing_timeout=SECONDS)
    if not parsed_gold:
        raise ValueError(f"the expected answer cannot be read: {gold[:200]!r}")
    parsed_answer = parse(f"${answer}$", targets, parsing_timeout=SECONDS)
    return bool(verify(parsed_gold, parsed_answer, timeout_seconds=SECONDS))
