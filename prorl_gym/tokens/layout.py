"""How a conversation is put before a chat template: tools the template's own way, or as text where it knows none.

As text, the Hermes way: function schemas at the end of the system message, calls in the assistant's text, and all
results of one turn in one user message, each between `<tool_response>` tags.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prorl_gym.tokens.body import Vocabulary
from prorl_gym.tokens.reasoning import CLOSE, OPEN
from prorl_gym.tokens.records import ChatMessage, ToolRequest
from prorl_gym.tokens.toolcalls import ToolCallFormat, format_call

_CALL_SYNTAX: dict[ToolCallFormat, str] = {
    "hermes": '<tool_call>\n{"name": "<tool name>", "arguments": {<arguments>}}\n</tool_call>',
    "fenced": '```json\n{"name": "<tool name>", "arguments": {<arguments>}}\n```',
}


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to put conversations before a template.

    Attributes:
        tools: `native` hands tools, calls and results to the template; `text` writes them into messages.
        calls: How the model is to write its calls.
        reasoning: `field` gives reasoning as `reasoning_content`; `inline` writes it before the content in think tags.
        system: False for a template without a system role: that text then goes before the first user message.
        alternate: True for a template that refuses two user messages in a row: they become one.
    """

    tools: Literal["native", "text"]
    calls: ToolCallFormat
    reasoning: Literal["field", "inline"] = "inline"
    system: bool = True
    alternate: bool = False

    def schemas(self, tools: Sequence[dict[str, Any]], vocabulary: Vocabulary | None) -> list[dict[str, Any]]:
        """What the template is given as tools."""
        if self.tools == "text":
            return []
        return list(tools) if vocabulary is None else [vocabulary.guard_schema(tool) for tool in tools]

    def messages(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], vocabulary: Vocabulary | None
    ) -> list[dict[str, Any]]:
        """What the template is given as messages; bodies are guarded with `vocabulary`, or as they are with None."""
        writer = _Writer(self, vocabulary)
        laid_out: list[dict[str, Any]] = []
        results: list[str] | None = None
        for message in messages:
            if message.role == "tool" and self.tools == "text":
                response = f"<tool_response>\n{writer.body(message.content)}\n</tool_response>"
                if results is None:
                    results = []
                    laid_out.append({"role": "user"})
                results.append(response)
                laid_out[-1]["content"] = "\n".join(results)
                continue
            results = None
            laid_out.append(writer.message(message))
        if tools and self.tools == "text":
            _add_system(laid_out, self._instructions(tools, writer))
        if not self.system and laid_out and laid_out[0]["role"] == "system":
            _into_first_user(laid_out)
        return _joined_users(laid_out) if self.alternate else laid_out

    def _instructions(self, tools: Sequence[dict[str, Any]], writer: "_Writer") -> str:
        schemas = "\n".join(json.dumps(writer.schema(tool), ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\nYou can call the tools whose JSON schemas stand between the tags.\n"
            f"<tools>\n{schemas}\n</tools>\n\n"
            f"To call one, write exactly this, once per call:\n{_CALL_SYNTAX[self.calls]}\n"
            "The result comes back to you between <tool_response> tags."
        )


@dataclass(frozen=True, slots=True)
class _Writer:
    layout: Layout
    vocabulary: Vocabulary | None

    def body(self, text: str) -> str:
        return text if self.vocabulary is None else self.vocabulary.guard(text)

    def schema(self, tool: dict[str, Any]) -> Any:
        return tool if self.vocabulary is None else self.vocabulary.guard_schema(tool)

    def json(self, value: Any) -> Any:
        return value if self.vocabulary is None else self.vocabulary.guard_json(value)

    def message(self, message: ChatMessage) -> dict[str, Any]:
        content = self.body(message.content)
        laid_out: dict[str, Any] = {"role": message.role, "content": content}
        if message.role == "assistant":
            runnable = [request for request in message.tool_requests if request.arguments is not None]
            if self.layout.tools == "native" and runnable:
                laid_out["tool_calls"] = [self._native_call(request) for request in runnable]
            elif runnable:
                calls = [self._text_call(request) for request in runnable]
                content = "\n".join([content, *calls] if message.content else calls)
            if message.reasoning is not None and self.layout.reasoning == "field":
                laid_out["reasoning_content"] = self.body(message.reasoning)
            elif message.reasoning is not None:
                content = f"{OPEN}\n{self.body(message.reasoning)}\n{CLOSE}\n\n{content}"
            laid_out["content"] = content
        elif message.role == "tool":
            laid_out["tool_call_id"] = self.json(message.tool_call_id or "")
            if message.name is not None:
                laid_out["name"] = self.json(message.name)
        return laid_out

    def _native_call(self, request: ToolRequest) -> dict[str, Any]:
        function = {"name": self.json(request.name), "arguments": self.json(request.arguments)}
        return {"type": "function", "id": request.id, "function": function}

    def _text_call(self, request: ToolRequest) -> str:
        return format_call(self.json(request.name), self.json(request.arguments), self.layout.calls)


def _add_system(laid_out: list[dict[str, Any]], text: str) -> None:
    if laid_out and laid_out[0]["role"] == "system":
        laid_out[0] = {**laid_out[0], "content": f"{laid_out[0]['content']}\n\n{text}"}
    else:
        laid_out.insert(0, {"role": "system", "content": text})


def _into_first_user(laid_out: list[dict[str, Any]]) -> None:
    system = laid_out.pop(0)
    for index, message in enumerate(laid_out):
        if message["role"] == "user":
            laid_out[index] = {**message, "content": f"{system['content']}\n\n{message['content']}"}
            return
    laid_out.insert(0, {"role": "user", "content": system["content"]})


def _joined_users(laid_out: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    joined: list[dict[str, Any]] = []
    for message in laid_out:
        if joined and message["role"] == joined[-1]["role"] == "user":
            joined[-1] = {**message, "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined
