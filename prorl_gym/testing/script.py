"""What a scripted language model answers, and how the answer of one call is chosen.

A call's turn is the number of different earlier prompts that are proper prefixes of its own. So equal conversations
run side by side and each gets the same replies, a retry of one prompt stays on its turn, and the continuation of an
aborted call (prompt + partial ids) is the next turn.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, TypeAdapter

Fault: TypeAlias = Literal[
    "status",  # an HTTP error with `Reply.status`
    "refuse",  # the connection is closed without a byte
    "hang",  # no answer, ever
    "die_mid_body",  # half the body, then the connection is closed
    "short_ids",  # usage claims 3 tokens more than `token_ids` holds
    "short_logprobs",  # one logprob fewer than ids
    "nan_logprobs",  # the last logprob is NaN (as Python writes it)
    "inf_logprobs",  # the last logprob is -Infinity (as Python writes it)
    "null_logprobs",  # the last logprob is null
    "overflow_logprobs",  # the last logprob is -1e999: valid JSON, but no finite float
    "no_logprobs",  # logprobs are null although they were asked for
    "null_ids",  # `token_ids` is null, as an engine without return_token_ids answers
    "no_choices",  # an empty list of choices
    "not_an_object",  # the body is a JSON list
    "invalid_json",  # the body is cut off, the content length is right
]


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted answer.

    Attributes:
        text: What the model says; encoded by the server's tokenizer. Ignored when `ids` is given.
        ids: The sampled ids, taken as they are.
        logprobs: One per id; None generates them from id and position, always the same ones.
        finish_reason: `stop`, `length`, `abort` or whatever an engine may say.
        end_turn: Append the end-of-turn id (an engine's sampled ids include it) when `finish_reason` is `stop`.
            None: yes for `text`, no for `ids`.
        delay_s: Seconds before the answer.
        hold: Answer only when the test calls `ScriptedLlm.release`.
        fault: What goes wrong, see `Fault`.
        status: The HTTP status of fault `status`.
        weight_versions: Half-open spans `(version, start, end)` over the ids, reported as the engine's own.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    text: str = ""
    ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    finish_reason: str = "stop"
    end_turn: bool | None = None
    delay_s: float = 0.0
    hold: bool = False
    fault: Fault | None = None
    status: int = 500
    weight_versions: tuple[tuple[int, int, int], ...] | None = None


Turn: TypeAlias = Reply | tuple[Reply, ...]
"""The answer of one turn, or one per attempt at it (calls with an equal prompt); the last one repeats."""

ReplyFunction: TypeAlias = Callable[[Sequence[int], int], Reply]
"""`reply(prompt_ids, request_index) -> Reply`, called on the event loop."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns for prompts whose decoded text contains `contains`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    contains: str
    replies: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """Replies per turn: of the first conversation that fits, else `replies`. Beyond the end the last one repeats."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    replies: tuple[Turn, ...] = (Reply(),)
    conversations: tuple[Conversation, ...] = ()

    def pick(self, turn: int, attempt: int, prompt_text: Callable[[], str]) -> Reply:
        """Return the reply for attempt `attempt` (from 0) at turn `turn` (from 0)."""
        replies = self.replies
        if self.conversations:
            text = prompt_text()
            replies = next((c.replies for c in self.conversations if c.contains in text), replies)
        entry = replies[min(turn, len(replies) - 1)]
        return entry if isinstance(entry, Reply) else entry[min(attempt, len(entry) - 1)]


def load_script(path: Path) -> Script:
    """Read a script from a JSON file with the fields of `Script`.

    Raises:
        pydantic.ValidationError: An unknown field or a wrong type; the message names its place.
    """
    return TypeAdapter(Script).validate_json(path.read_bytes())


def as_script(script: Script | Reply | Sequence[Reply | Sequence[Reply]]) -> Script:
    """Return a `Script` from one reply or a list of turns."""
    if isinstance(script, Script):
        return script
    if isinstance(script, Reply):
        return Script((script,))
    return Script(tuple(turn if isinstance(turn, Reply) else tuple(turn) for turn in script))


class PromptIndex:
    """Remembers prompts and tells how many different earlier ones are proper prefixes of a new one.

    Prompts are kept as big-endian bytes in a sorted list: whatever sorts between a prefix of P and P itself starts
    with that prefix, so each prefix is found by one bisection.
    """

    def __init__(self) -> None:
        self._prompts: list[bytes] = []
        self._attempts: dict[bytes, int] = {}

    def add(self, prompt_ids: Sequence[int]) -> tuple[int, int]:
        """Record a prompt; return its turn and its attempt (how often it was seen before)."""
        packed = array("I", prompt_ids)
        packed.byteswap()
        prompt = packed.tobytes()
        turn = self._count_prefixes(prompt)
        attempt = self._attempts.get(prompt, 0)
        self._attempts[prompt] = attempt + 1
        if attempt == 0:
            self._prompts.insert(bisect_left(self._prompts, prompt), prompt)
        return turn, attempt

    def _count_prefixes(self, prompt: bytes) -> int:
        count = 0
        position = bisect_left(self._prompts, prompt)
        while position:
            candidate = self._prompts[position - 1]
            if prompt.startswith(candidate):
                count += 1
                prompt = candidate
                position -= 1
            else:
                prompt = prompt[: _common_bytes(prompt, candidate)]
                position = bisect_right(self._prompts, prompt)
        return count


def _common_bytes(left: bytes, right: bytes) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
