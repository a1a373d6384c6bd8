"""Rendering with any chat template: what a prompt gains is read off the rendering of a short conversation.

The ids a turn adds depend on the new messages alone. They are read off a conversation of one question, one answer that
is nothing but an anchor, and the new messages: all that follows the anchor. That this is what the template does in any
conversation is proven in `proof` before a renderer is handed out.
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from prorl_gym.tokens.body import Vocabulary
from prorl_gym.tokens.bridge import BridgingRenderer, Positions
from prorl_gym.tokens.chat_template import ChatTemplate, TemplateRefusal
from prorl_gym.tokens.layout import Layout
from prorl_gym.tokens.records import ChatMessage

ANCHOR = "\ufdd3anchor\ufdd3"
"""No text of a template holds these reserved characters."""
_QUESTION = ChatMessage("user", "x")
_REASONING = "\ufdd3reasoning\ufdd3"
_MAX_ATTRIBUTED = 32
"""A first prompt of more messages is not attributed message by message: that takes one rendering each."""


class TemplateRenderer(BridgingRenderer):
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
        self.calls = layout.calls
        self.keep_thinking = keep_thinking
        control_ids = {token.id for token in vocabulary.control.values()}
        first = vocabulary.encode(self.difference([_QUESTION], ()))[:1]
        self.close_id = first[0] if first and first[0] in control_ids else None
        own = () if self.close_id is None else (self.close_id,)
        self.stop_token_ids = tuple(dict.fromkeys((*own, *stop_token_ids)))
        prompts = {self.generation_prompt(thinking) for thinking in (None, True, False)}
        self.generation_ids = sorted(map(vocabulary.encode, prompts), key=len, reverse=True)
        self.strips_before_user = self._strips(_QUESTION)
        self.strips_before_tool = self._strips(ChatMessage("tool", "x", tool_call_id="call_0_0"))

    def whole(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], enable_thinking: bool | None
    ) -> tuple[list[int], Positions]:
        """See `BridgingRenderer.whole`.

        Raises:
            TemplateRefusal: The template refuses the conversation.
        """
        text = self.text(messages, tools, enable_thinking=enable_thinking)
        if len(messages) > _MAX_ATTRIBUTED:
            return self.vocabulary.encode(text), None
        beginnings = [self._text_or_empty(messages[:count], tools) for count in range(1, len(messages))]
        return self._encode(text, beginnings)

    def addition(
        self, new: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], enable_thinking: bool | None
    ) -> tuple[list[int], Positions]:
        """See `BridgingRenderer.addition`.

        Raises:
            TemplateRefusal: The template refuses the conversation.
        """
        text = self.difference(new, tools, enable_thinking=enable_thinking)
        beginnings = [self.difference(new[:count], tools, generate=False) for count in range(1, len(new))]
        return self._encode(text, beginnings)

    def digest(self) -> str:
        """See `ChatRenderer.digest`."""
        parts = (self.vocabulary.digest(), self.template.source, repr(self.layout), repr(self.keep_thinking))
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

    def _strips(self, follower: ChatMessage) -> bool:
        """Whether the template drops the reasoning of an assistant message once `follower` comes after it."""
        try:
            thought = ChatMessage("assistant", "x", reasoning=_REASONING)
            return _REASONING not in self.text([_QUESTION, thought, follower], ())
        except TemplateRefusal:
            return False

    def _text_or_empty(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> str:
        try:
            return self.text(messages, tools, generate=False)
        except TemplateRefusal:
            return ""

    def _encode(self, text: str, beginnings: Sequence[str]) -> tuple[list[int], Positions]:
        """Ids of a text; each message after the first begins where the text leaves what it shares with a beginning."""
        edges = [_common_length(beginning, text) for beginning in beginnings]
        if any(a > b for a, b in pairwise(edges)):
            return self.vocabulary.encode(text), None
        return self.vocabulary.encode_at(text, edges)


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
