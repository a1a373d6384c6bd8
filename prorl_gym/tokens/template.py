"""Rendering with any chat template: what a prompt gains is read off the rendering of a short conversation.

The ids a turn adds depend on the new messages alone. They are read off a conversation of one question, one answer that
is nothing but an anchor, and the new messages: all that follows the anchor. That this is what the template does in any
conversation is proven in `proof` before a renderer is handed out.
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from prorl_gym.tokens.base import ChatRenderer
from prorl_gym.tokens.body import Vocabulary
from prorl_gym.tokens.chat_template import ChatTemplate, TemplateRefusal
from prorl_gym.tokens.layout import Layout
from prorl_gym.tokens.reasoning import CLOSE, OPEN, split_reasoning
from prorl_gym.tokens.records import ChatMessage, Parsed, Rendered
from prorl_gym.tokens.toolcalls import parse_calls

ANCHOR = "\ufdd3anchor\ufdd3"
"""No text of a template holds these reserved characters."""
_QUESTION = ChatMessage("user", "x")
_REASONING = "\ufdd3reasoning\ufdd3"
_MAX_ATTRIBUTED = 32
"""A first prompt of more messages is not attributed message by message: that takes one rendering each."""


class TemplateRenderer(ChatRenderer):
    """Renders with one template, laid out in one way, and parses Hermes-style or fenced calls."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: ChatTemplate,
        layout: Layout,
        *,
        stop_token_ids: Sequence[int] = (),
        keep_thinking: bool = False,
    ) -> None:
        """Find out the template's manners.

        Args:
            vocabulary: Of the model's tokenizer.
            template: The model's own.
            layout: How conversations are put before it.
            stop_token_ids: Ids that end a turn, beside the template's own end-of-turn token.
            keep_thinking: Keep past reasoning in the prompt where the template would strip it.

        Raises:
            TemplateRefusal: The template cannot render the simplest conversation in this layout.
        """
        self.name = f"template-difference:{layout.tools}-{layout.calls}{',thinking=keep' if keep_thinking else ''}"
        self.vocabulary = vocabulary
        self.template = template
        self.layout = layout
        self._keep_thinking = keep_thinking
        control_ids = {token.id for token in vocabulary.control.values()}
        first = vocabulary.encode(self.difference([_QUESTION], ()))[:1]
        self.close_id = first[0] if first and first[0] in control_ids else None
        own = () if self.close_id is None else (self.close_id,)
        self.stop_token_ids = tuple(dict.fromkeys((*own, *stop_token_ids)))
        self._generation = self._generation_prompts()
        self._strips_before_user = self._strips(_QUESTION)
        self._strips_before_tool = self._strips(ChatMessage("tool", "x", tool_call_id="call_0_0"))

    def start(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], *, enable_thinking: bool | None = None
    ) -> Rendered:
        """See `ChatRenderer.start`."""
        text = self.text(messages, tools, enable_thinking=enable_thinking)
        edges: list[int] | None = None
        if len(messages) <= _MAX_ATTRIBUTED:
            edges = self._edges(
                [self._text_or_none(messages[:count], tools) for count in range(1, len(messages))], text
            )
        ids, positions = self.vocabulary.encode_at(text, edges or ())
        spans = () if edges is None or positions is None else _spans(positions, 0, len(ids))
        return Rendered(ids, spans if messages else ())

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
        if self._rewrites(history, new):
            return self._rewritten(history, new, tools, enable_thinking)
        text, edges = self._addition(new, tools, enable_thinking)
        added, positions = self.vocabulary.encode_at(text, edges or ())
        if self.close_id is not None and output_ids and output_ids[-1] == self.close_id:
            added = added[1:]
            positions = None if positions is None else [max(position - 1, 0) for position in positions]
        elif self._cut_while_thinking(output_ids, prompt_ids):
            close = self.vocabulary.encode(f"\n{CLOSE}\n\n")
            added = close + added
            positions = None if positions is None else [position + len(close) for position in positions]
        ids = [*prompt_ids, *output_ids, *added]
        start = len(ids) - len(added)
        if not new or edges is None or positions is None:
            return Rendered(ids)
        return Rendered(ids, _spans([start + position for position in positions], start, len(ids)))

    def parse(self, output_ids: Sequence[int], prompt_ids: Sequence[int], *, turn: int) -> Parsed:
        """See `ChatRenderer.parse`."""
        end = next((at for at, token in enumerate(output_ids) if token in self.stop_token_ids), None)
        text = self.vocabulary.decode(output_ids[:end])
        split = split_reasoning(text, opened=self._opened_thinking(prompt_ids))
        calls = parse_calls(split.content, self.layout.calls, complete=end is not None, turn=turn)
        message = ChatMessage("assistant", calls.content, split.reasoning, calls.requests)
        return Parsed(message, complete=end is not None)

    def count_tokens(self, text: str) -> int:
        """See `ChatRenderer.count_tokens`."""
        return self.vocabulary.count_tokens(text)

    def clip(self, text: str, max_tokens: int) -> str:
        """See `ChatRenderer.clip`."""
        return self.vocabulary.clip(text, max_tokens)

    def digest(self) -> str:
        """See `ChatRenderer.digest`."""
        parts = (self.vocabulary.digest(), self.template.source, repr(self.layout), repr(self._keep_thinking))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def text(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]],
        *,
        generate: bool = True,
        enable_thinking: bool | None = None,
    ) -> str:
        """The whole conversation as the template writes it, bodies guarded.

        Raises:
            TemplateRefusal: The template refuses it.
        """
        return self.template.render(
            self.layout.messages(messages, tools, self.vocabulary),
            self.layout.schemas(tools, self.vocabulary),
            generate=generate,
            enable_thinking=enable_thinking,
        )

    def difference(
        self,
        new: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]],
        *,
        generate: bool = True,
        enable_thinking: bool | None = None,
    ) -> str:
        """What follows an assistant's words when these messages come after them, its end of turn first.

        Raises:
            TemplateRefusal: The template refuses such a conversation, or drops what the assistant said.
        """
        laid_out = self.layout.messages([_QUESTION, ChatMessage("assistant"), *new], (), self.vocabulary)
        laid_out[1]["content"] = ANCHOR
        schemas = self.layout.schemas(tools, self.vocabulary)
        text = self.template.render(laid_out, schemas, generate=generate, enable_thinking=enable_thinking)
        at = text.find(ANCHOR)
        if at < 0:
            raise TemplateRefusal("it drops what an assistant message says")
        return text[at + len(ANCHOR) :]

    def generation_prompt(self, enable_thinking: bool | None = None) -> str:
        """What the template adds to a conversation to have it answered.

        Raises:
            TemplateRefusal: It writes the conversation itself differently then.
        """
        asked = self.text([_QUESTION], (), enable_thinking=enable_thinking)
        told = self.text([_QUESTION], (), generate=False, enable_thinking=enable_thinking)
        if not asked.startswith(told):
            raise TemplateRefusal("its generation prompt changes the messages before it")
        return asked[len(told) :]

    def _addition(
        self, new: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], enable_thinking: bool | None
    ) -> tuple[str, list[int] | None]:
        """The text that new messages add, and where in it each after the first begins."""
        text = self.difference(new, tools, enable_thinking=enable_thinking)
        beginnings = [self.difference(new[:count], tools, generate=False) for count in range(1, len(new))]
        return text, self._edges(beginnings, text)

    def _rewritten(
        self,
        history: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]],
        enable_thinking: bool | None,
    ) -> Rendered:
        """The whole conversation anew; what the new messages add is its end, past the assistant's end of turn."""
        text = self.text([*history, *new], tools, enable_thinking=enable_thinking)
        addition, edges = self._addition(new, tools, enable_thinking)
        if edges is None or not text.endswith(addition):
            return Rendered(self.vocabulary.encode(text), append_only=False)
        base = len(text) - len(addition)
        close = next((t.text for t in self.vocabulary.control.values() if t.id == self.close_id), "")
        ids, positions = self.vocabulary.encode_at(text, [base + len(close), *(base + edge for edge in edges)])
        return Rendered(ids, tuple(pairwise([*(positions or ()), len(ids)])), append_only=False)

    def _generation_prompts(self) -> list[tuple[list[int], bool]]:
        """The ids of each generation prompt, longest first, and whether it leaves a reasoning block open."""
        texts = {self.generation_prompt(thinking) for thinking in (None, True, False)}
        prompts = [(self.vocabulary.encode(text), text.rstrip().endswith(OPEN)) for text in texts]
        return sorted(prompts, key=lambda prompt: len(prompt[0]), reverse=True)

    def _opened_thinking(self, prompt_ids: Sequence[int]) -> bool:
        for ids, opens in self._generation:
            if ids and list(prompt_ids[-len(ids) :]) == ids:
                return opens
        return False

    def _cut_while_thinking(self, output_ids: Sequence[int], prompt_ids: Sequence[int]) -> bool:
        if any(token in self.stop_token_ids for token in output_ids):
            return False
        text = self.vocabulary.decode(output_ids)
        return split_reasoning(text, opened=self._opened_thinking(prompt_ids)).open

    def _strips(self, follower: ChatMessage) -> bool:
        """Whether the template drops the reasoning of an assistant message once `follower` comes after it."""
        try:
            thought = ChatMessage("assistant", "x", reasoning=_REASONING)
            return _REASONING not in self.text([_QUESTION, thought, follower], ())
        except TemplateRefusal:
            return False

    def _rewrites(self, history: Sequence[ChatMessage], new: Sequence[ChatMessage]) -> bool:
        """Whether the template drops reasoning that the prompt so far still holds."""
        if self._keep_thinking:
            return False
        if self._strips_before_tool:
            return bool(new) and bool((history[-1].reasoning or "").strip())
        if not self._strips_before_user or all(message.role != "user" for message in new):
            return False
        for message in reversed(history):
            if message.role == "user":
                return False
            if (message.reasoning or "").strip():
                return True
        return False

    def _text_or_none(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> str | None:
        try:
            return self.text(messages, tools, generate=False)
        except TemplateRefusal:
            return None

    @staticmethod
    def _edges(prefixes: Sequence[str | None], text: str) -> list[int] | None:
        """Where each message after the first begins: the ends of what `text` shares with its beginnings."""
        edges = [0 if prefix is None else _common_length(prefix, text) for prefix in prefixes]
        return edges if all(a <= b for a, b in pairwise(edges)) else None


def _spans(positions: Sequence[int], start: int, end: int) -> tuple[tuple[int, int], ...]:
    return tuple(pairwise([start, *positions, end]))


def _common_length(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
