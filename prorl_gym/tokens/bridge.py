"""What every renderer of ours does alike: append to sampled ids, split where history is rewritten, read a turn.

History counts as rewritten where the template drops reasoning that was sampled. An empty reasoning block, and whatever
else a generation prompt held that the template would not write into history, stays: it says nothing.
"""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from prorl_gym.tokens.base import ChatRenderer
from prorl_gym.tokens.body import Vocabulary
from prorl_gym.tokens.reasoning import CLOSE, OPEN, split_reasoning
from prorl_gym.tokens.records import ChatMessage, Parsed, Rendered
from prorl_gym.tokens.toolcalls import ToolCallFormat, parse_calls

Positions = list[int] | None
"""Where in some ids each message after the first begins; None where that cannot be told."""


class BridgingRenderer(ChatRenderer):
    """A renderer that knows how to write a whole conversation, and what new messages add after an assistant's words.

    Attributes:
        close_id: The control token with which the model's format ends an assistant's turn; None if that is mere text.
        calls: How the model writes tool calls.
        strips_before_user: Past reasoning is dropped once a user message follows.
        strips_before_tool: Past reasoning is dropped as soon as anything follows.
    """

    vocabulary: Vocabulary
    close_id: int | None
    calls: ToolCallFormat = "hermes"
    keep_thinking: bool = False
    strips_before_user: bool = False
    strips_before_tool: bool = False
    generation_ids: Sequence[list[int]] = ()
    """Generation prompts, the longest first."""

    @abstractmethod
    def whole(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], enable_thinking: bool | None
    ) -> tuple[list[int], Positions]:
        """Ids of a conversation with its generation prompt."""

    @abstractmethod
    def addition(
        self, new: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], enable_thinking: bool | None
    ) -> tuple[list[int], Positions]:
        """Ids that follow an assistant's words when these messages come after them, its end of turn first."""

    def start(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], *, enable_thinking: bool | None = None
    ) -> Rendered:
        """See `ChatRenderer.start`."""
        ids, positions = self.whole(messages, tools, enable_thinking)
        return Rendered(ids, _spans(positions, 0, len(ids)) if messages else ())

    def extend(
        self,
        history: Sequence[ChatMessage],
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        new: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]],
        *,
        enable_thinking: bool | None = None,
    ) -> Rendered:
        """See `ChatRenderer.extend`."""
        added, positions = self.addition(new, tools, enable_thinking)
        if self._rewrites(history, new):
            whole, _ = self.whole([*history, *new], tools, enable_thinking)
            if whole[len(whole) - len(added) :] != added:
                return Rendered(whole, append_only=False)
            start = len(whole) - len(added)
            spans = _spans(positions, start, len(whole), first=start + (self.close_id is not None))
            return Rendered(whole, spans if new else (), append_only=False)
        if self.close_id is not None and output_ids and output_ids[-1] == self.close_id:
            lead, added = -1, added[1:]
        elif self._cut_while_thinking(output_ids, prompt_ids):
            close = self.vocabulary.encode(f"\n{CLOSE}\n\n")
            lead, added = len(close), close + added
        else:
            lead = 0
        ids = [*prompt_ids, *output_ids, *added]
        start = len(ids) - len(added)
        return Rendered(ids, _spans(positions, start + lead, len(ids), first=start) if new else ())

    def parse(self, output_ids: Sequence[int], prompt_ids: Sequence[int], *, turn: int) -> Parsed:
        """See `ChatRenderer.parse`."""
        end = self._end_of_turn(output_ids)
        text = self.vocabulary.decode(output_ids[:end])
        split = split_reasoning(text, opened=self._opened_thinking(prompt_ids))
        calls = parse_calls(split.content, self.calls, complete=end is not None, turn=turn)
        message = ChatMessage("assistant", calls.content, split.reasoning, calls.requests)
        return Parsed(message, complete=end is not None)

    def count_tokens(self, text: str) -> int:
        """See `ChatRenderer.count_tokens`."""
        return self.vocabulary.count_tokens(text)

    def clip(self, text: str, max_tokens: int) -> str:
        """See `ChatRenderer.clip`."""
        return self.vocabulary.clip(text, max_tokens)

    def _end_of_turn(self, output_ids: Sequence[int]) -> int | None:
        return next((at for at, token in enumerate(output_ids) if token in self.stop_token_ids), None)

    def _opened_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside a reasoning block."""
        for ids in self.generation_ids:
            if ids and list(prompt_ids[-len(ids) :]) == ids:
                return self.vocabulary.decode(ids).rstrip().endswith(OPEN)
        return False

    def _cut_while_thinking(self, output_ids: Sequence[int], prompt_ids: Sequence[int]) -> bool:
        if self._end_of_turn(output_ids) is not None:
            return False
        text = self.vocabulary.decode(output_ids)
        return split_reasoning(text, opened=self._opened_thinking(prompt_ids)).open

    def _rewrites(self, history: Sequence[ChatMessage], new: Sequence[ChatMessage]) -> bool:
        """Whether the template drops reasoning that the prompt so far still holds."""
        if self.keep_thinking:
            return False
        if self.strips_before_tool:
            return bool(new) and bool((history[-1].reasoning or "").strip())
        if not self.strips_before_user or all(message.role != "user" for message in new):
            return False
        for message in reversed(history):
            if message.role == "user":
                return False
            if (message.reasoning or "").strip():
                return True
        return False


def _spans(positions: Positions, start: int, end: int, *, first: int | None = None) -> tuple[tuple[int, int], ...]:
    """Ranges between positions that count from `start`; the first range begins at `first`, or at `start`."""
    if positions is None:
        return ()
    begin = start if first is None else first
    return tuple(pairwise([begin, *(max(start + position, begin) for position in positions), end]))
