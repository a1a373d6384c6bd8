"""The renderer's contract: messages to ids, ids to messages, never the same stretch twice."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from prorl_gym.tokens.records import ChatMessage, Parsed, Rendered


class ChatRenderer(ABC):
    """Renders conversations for one model family.

    Stateless and safe to share between jobs. Message bodies are data: no text in them becomes a control token.
    """

    name: str
    """Family and origin, for provenance, e.g. `renderers:qwen3` or `template-difference`."""
    stop_token_ids: tuple[int, ...]
    """Ids that end an assistant turn; sent to the engine with every call."""

    @abstractmethod
    def start(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], *, enable_thinking: bool | None = None
    ) -> Rendered:
        """Render a whole conversation up to and including the generation prompt.

        Args:
            messages: The conversation; the last one is not an assistant's.
            tools: OpenAI function schemas, possibly none.
            enable_thinking: For templates that know it; None is the template's default.

        Raises:
            ValueError: The model's format has no way to say this conversation.
        """

    @abstractmethod
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
        """Render the next prompt after a sampled turn and what followed it.

        Append-only wherever the template allows it; the cost then depends on `new` alone. A turn that was cut before
        its end-of-turn token gets its close in the new ids, never in the sampled ones. Where the template rewrites
        history the whole conversation is rendered again and `append_only` is False.

        Args:
            history: Every message before `new`, the sampled assistant turn last.
            prompt_ids: [P] the prompt of the call before.
            output_ids: [T] what that call sampled.
            new: Observations and user messages since then, all of them in one call.
            tools: As given to `start`.
            enable_thinking: As given to `start`.

        Raises:
            ValueError: The model's format has no way to say this conversation.
        """

    @abstractmethod
    def parse(self, output_ids: Sequence[int], prompt_ids: Sequence[int], *, turn: int) -> Parsed:
        """Read one sampled turn.

        Never raises on anything a model can sample: a malformed call becomes a `ToolRequest` with an error.

        Args:
            output_ids: [T] the sampled ids.
            prompt_ids: [P] the prompt they follow (it may have opened a thinking block).
            turn: Index of the call within the episode; makes tool-call ids unique.
        """

    @abstractmethod
    def count_tokens(self, text: str) -> int:
        """Tokens of `text` as a message body; used to bound observations before they are rendered."""

    @abstractmethod
    def clip(self, text: str, max_tokens: int) -> str:
        """The longest head and tail of `text` that together fit `max_tokens`, with a note of what was left out."""

    @abstractmethod
    def digest(self) -> str:
        """Hash of tokenizer and template, for provenance."""
