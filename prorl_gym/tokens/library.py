"""Rendering with the `renderers` library for the model families it knows, behind our own guards.

The library is given a tokenizer that encodes frames and guarded bodies (so no body makes control tokens), never sees
sampled ids when it writes new messages (so it cannot trim them or split without need), and has its parsed calls checked
again. A family is used only once it is proven, on probe conversations, for the very tokenizer and template at hand.
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from prorl_gym.tokens.body import Vocabulary
from prorl_gym.tokens.bridge import BridgingRenderer, Positions
from prorl_gym.tokens.chat_template import TemplateRefusal
from prorl_gym.tokens.layout import Layout
from prorl_gym.tokens.reasoning import CLOSE
from prorl_gym.tokens.records import ChatMessage, Parsed, ToolRequest
from prorl_gym.tokens.toolcalls import check_call, parse_calls

FAMILIES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "llama": "llama-3",
    "deepseek_v3": "deepseek-v3",
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
}
"""Family worth trying for a `model_type`; fine-tunes share it, their templates may not, hence the proof."""

_NO_FAMILY = {"auto", "default", "custom"}
_QUESTION = ChatMessage("user", "x")
_REASONING = "Considered."
_CALL = ToolRequest("call_0_0", "bash", {"command": 'echo "</tool_call>"', "n": 1})


def known_families() -> list[str]:
    """Names that `policy.renderer` accepts."""
    return sorted(_configs())


class LibraryRenderer(BridgingRenderer):
    """One family of the library."""

    def __init__(
        self,
        family: str,
        tokenizer: Any,
        vocabulary: Vocabulary,
        *,
        stop_token_ids: Sequence[int] = (),
        keep_thinking: bool = False,
    ) -> None:
        """Make the family's renderers and find out its manners.

        Args:
            family: One of `known_families`.
            tokenizer: The model's own, of transformers.
            vocabulary: Of the same tokenizer.
            stop_token_ids: Ids that end a turn, beside the family's own.
            keep_thinking: Keep past reasoning in the prompt where the template would strip it.

        Raises:
            TemplateRefusal: The tokenizer lacks the family's control tokens, or the family cannot write a conversation.
        """
        self.name = f"renderers:{family}{',thinking=keep' if keep_thinking else ''}"
        self.vocabulary = vocabulary
        self.keep_thinking = keep_thinking
        self.layout = Layout("native", "hermes", reasoning="field")
        self._proxy = _GuardedTokenizer(tokenizer, vocabulary)
        self._family = family
        self._by_thinking = {thinking: self._make(thinking) for thinking in (None, True, False)}
        library_stops = self._by_thinking[None].get_stop_token_ids()
        self._close = self._find_close(library_stops)
        self.close_id = self._close
        self.stop_token_ids = tuple(dict.fromkeys((self._close, *library_stops, *stop_token_ids)))
        prompts = {tuple(self._generation(thinking)) for thinking in self._by_thinking}
        self.generation_ids = sorted(map(list, prompts), key=len, reverse=True)
        self.strips_before_user = self._strips(_QUESTION)
        self.strips_before_tool = self._strips(ChatMessage("tool", "x", tool_call_id="call_0_0", name="bash"))
        self._hermes = self._writes_hermes()

    def whole(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], enable_thinking: bool | None
    ) -> tuple[list[int], Positions]:
        """See `BridgingRenderer.whole`.

        Raises:
            TemplateRefusal: The family cannot write this conversation.
        """
        rendered = self._call(
            self._by_thinking[enable_thinking].render, messages, tools=tools, add_generation_prompt=True
        )
        return list(rendered.token_ids), _positions(rendered.message_indices, len(messages))

    def addition(
        self, new: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], enable_thinking: bool | None
    ) -> tuple[list[int], Positions]:
        """See `BridgingRenderer.addition`.

        Raises:
            TemplateRefusal: The family cannot append these messages.
        """
        renderer = self._by_thinking[enable_thinking]
        prompt = list(self._call(renderer.render, [_QUESTION], add_generation_prompt=True).token_ids)
        said = f"x\n{CLOSE}\n\nx" if self._opened_thinking(prompt) else "x"
        before = [*prompt, *self.vocabulary.encode(said), self._close]
        if not new:
            return [self._close, *self._after_close(enable_thinking)], []
        bridged = self._call(renderer.bridge_to_next_turn, new, before=(prompt, before[len(prompt) :]), tools=tools)
        if bridged is None or bridged.token_ids[: len(before)] != before:
            raise TemplateRefusal("the family's renderer does not append to what was sampled")
        own = len(before) - 1
        positions = _positions(bridged.message_indices[own:], len(new))
        return list(bridged.token_ids[own:]), positions

    def parse(self, output_ids: Sequence[int], prompt_ids: Sequence[int], *, turn: int) -> Parsed:
        """See `ChatRenderer.parse`."""
        if self._hermes:
            return super().parse(output_ids, prompt_ids, turn=turn)
        end = self._end_of_turn(output_ids)
        sampled = [token for token in output_ids[:end] if 0 <= token < 1 << 31]
        try:
            parsed = self._by_thinking[None].parse_response(sampled, prompt_ids=list(prompt_ids))
        except Exception:  # noqa: BLE001 - the library's parsers on whatever a model may sample
            return Parsed(ChatMessage("assistant", self.vocabulary.decode(sampled)), complete=end is not None)
        requests = tuple(
            _request(f"call_{turn}_{index}", call, complete=end is not None or index + 1 < len(parsed.tool_calls))
            for index, call in enumerate(parsed.tool_calls)
        )
        raw = [call.raw for call, request in zip(parsed.tool_calls, requests, strict=True) if request.error]
        content = "\n".join(part for part in (parsed.content or "", *raw) if part)
        return Parsed(ChatMessage("assistant", content, parsed.reasoning_content, requests), complete=end is not None)

    def digest(self) -> str:
        """See `ChatRenderer.digest`."""
        from renderers import __version__

        parts = (self.vocabulary.digest(), self.name, __version__, repr(self._by_thinking[None].config))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _make(self, enable_thinking: bool | None) -> Any:
        """The family's own renderer, told never to refuse to append: `_rewrites` decides that.

        Raises:
            TemplateRefusal: It does not fit the tokenizer.
        """
        from renderers import create_renderer

        kind = _configs()[self._family]
        settings: dict[str, Any] = {"thinking_retention": "all"}
        if enable_thinking is not None and "enable_thinking" in kind.model_fields:
            settings["enable_thinking"] = enable_thinking
        template = getattr(self._proxy, "chat_template", None)
        if "date_string" in kind.model_fields and isinstance(template, str) and "strftime_now" in template:
            settings["date_string"] = datetime.now().strftime("%d %b %Y")
        for attempt in (settings, {key: value for key, value in settings.items() if key != "thinking_retention"}):
            try:
                return create_renderer(self._proxy, kind(**attempt))
            except Exception as error:  # noqa: BLE001 - whatever the library raises, the family does not fit
                failure = error
        raise TemplateRefusal(f"{type(failure).__name__}: {failure}")

    def _call(
        self,
        method: Any,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[dict[str, Any]] = (),
        before: tuple[list[int], list[int]] | None = None,
        **settings: Any,
    ) -> Any:
        """A method of the library on guarded messages.

        Raises:
            TemplateRefusal: It raised.
        """
        laid_out = self.layout.messages(messages, tools, self.vocabulary)
        schemas = self.layout.schemas(tools, self.vocabulary) or None
        try:
            return method(*(before or ()), laid_out, tools=schemas, **settings)
        except Exception as error:
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from error

    def _find_close(self, stops: Sequence[int]) -> int:
        """The stop token that ends an assistant message.

        Raises:
            TemplateRefusal: There is none.
        """
        history = [_QUESTION, ChatMessage("assistant", "x")]
        answer = list(self._call(self._by_thinking[None].render, history).token_ids)
        last: int | None = next((token for token in reversed(answer) if token in stops), None)
        if last is None:
            raise TemplateRefusal("the family ends no answer with a stop token")
        return last

    def _generation(self, enable_thinking: bool | None) -> list[int]:
        renderer = self._by_thinking[enable_thinking]
        asked = list(self._call(renderer.render, [_QUESTION], add_generation_prompt=True).token_ids)
        told = list(self._call(renderer.render, [_QUESTION]).token_ids)
        if asked[: len(told)] != told:
            raise TemplateRefusal("its generation prompt changes the messages before it")
        return asked[len(told) :]

    def _after_close(self, enable_thinking: bool | None) -> list[int]:
        """What stands between an end of turn and the next generation prompt, and that prompt."""
        answer = list(self._call(self._by_thinking[None].render, [_QUESTION, ChatMessage("assistant", "x")]).token_ids)
        last = len(answer) - 1 - answer[::-1].index(self._close)
        return answer[last + 1 :] + self._generation(enable_thinking)

    def _strips(self, follower: ChatMessage) -> bool:
        thought = ChatMessage("assistant", "x", reasoning=_REASONING)
        try:
            ids = list(self._call(self._by_thinking[None].render, [_QUESTION, thought, follower]).token_ids)
        except TemplateRefusal:
            return False
        return _REASONING not in self.vocabulary.decode(ids)

    def _writes_hermes(self) -> bool:
        """Whether the family's own calls are those that `parse_calls` reads."""
        message = ChatMessage("assistant", tool_requests=(_CALL,))
        ids = list(self._call(self._by_thinking[None].render, [_QUESTION, message]).token_ids)
        read = parse_calls(self.vocabulary.decode(ids), "hermes", complete=True, turn=0).requests
        return [(call.name, call.arguments) for call in read] == [(_CALL.name, _CALL.arguments)]


class _GuardedTokenizer:
    """What the library takes for a tokenizer: encodes frames and guarded bodies, all else is the real one's.

    It offers no offsets, which only serve masks of the library that we do not use.
    """

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._vocabulary.encode(text)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def _configs() -> dict[str, Any]:
    """Configuration class per family name; those of the library that stand for no family are left out."""
    from renderers import configs

    kinds: list[Any] = [kind for kind in vars(configs).values() if isinstance(kind, type)]
    families = [kind for kind in kinds if issubclass(kind, configs.BaseRendererConfig) and "name" in kind.model_fields]
    named = {kind.model_fields["name"].default: kind for kind in families}
    return {name: kind for name, kind in named.items() if isinstance(name, str) and name not in _NO_FAMILY}


def _positions(indices: Sequence[int], count: int) -> Positions:
    """Where each message after the first begins, from the message that each token belongs to."""
    begins = []
    for message in range(1, count):
        at = next((i for i, index in enumerate(indices) if index == message), None)
        if at is None:
            return None
        begins.append(at)
    return begins if all(a <= b for a, b in pairwise(begins)) else None


def _request(call_id: str, call: Any, *, complete: bool) -> ToolRequest:
    """The library's parse of one call, checked again: it calls some arguments fine that are no JSON object."""
    name = call.name if isinstance(call.name, str) else ""
    if call.status != "ok":
        reason = str(call.status).replace("_", " ") if complete else "it was cut off at the token limit"
        return ToolRequest(call_id, name, None, f"This tool call was not run: {reason}.")
    return check_call(call_id, {"name": call.name, "arguments": call.arguments})
