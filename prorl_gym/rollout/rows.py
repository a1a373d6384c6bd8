"""What a data row asks, read once for every agent. Rows are untrusted, so each refusal names a field."""

from collections.abc import Mapping
from typing import Any, Literal, cast

from prorl_gym.errors import RequestError
from prorl_gym.tokens.records import ChatMessage

TEXT_COLUMNS = ("question", "problem", "problem_statement")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def row_conversation(row: Mapping[str, Any]) -> list[ChatMessage] | None:
    """The conversation that the row itself holds: `responses_create_params.input`, else `prompt`; None without one.

    Each is a text or a list of messages, whose content is a text or text parts; an empty one counts as absent.

    Raises:
        RequestError: It is malformed; names the field.
    """
    params = row.get("responses_create_params")
    if isinstance(params, Mapping) and params.get("input"):
        messages = _conversation(params["input"], "instance.responses_create_params.input")
        instructions = params.get("instructions")
        if isinstance(instructions, str) and instructions:
            messages.insert(0, ChatMessage("system", instructions))
        return messages
    return _conversation(row["prompt"], "instance.prompt") if row.get("prompt") else None


def row_question(row: Mapping[str, Any]) -> str:
    """The question of a row that holds no conversation: the first of `TEXT_COLUMNS` that is not empty.

    Raises:
        RequestError: There is none, or it is no text.
    """
    for column in TEXT_COLUMNS:
        if row.get(column):
            if not isinstance(row[column], str):
                raise RequestError(f"{column} must be a text", field=f"instance.{column}")
            return str(row[column])
    columns = ", ".join(TEXT_COLUMNS)
    raise RequestError(
        f"the row asks nothing: it needs one of responses_create_params.input, prompt, {columns}", field="instance"
    )


def _conversation(value: object, field: str) -> list[ChatMessage]:
    if isinstance(value, str):
        return [ChatMessage("user", value)]
    if not isinstance(value, list):
        raise RequestError("must be a text or a list of messages", field=field)
    messages = [_message(item, f"{field}[{i}]") for i, item in enumerate(value)]
    if messages[-1].role == "assistant":
        raise RequestError("the last message must not be the assistant's", field=f"{field}[{len(messages) - 1}]")
    return messages


def _message(item: object, field: str) -> ChatMessage:
    if not isinstance(item, Mapping) or item.get("type", "message") != "message":
        raise RequestError("must be a message with role and content", field=field)
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise RequestError(f"role must be one of {', '.join(_ROLES)}", field=f"{field}.role")
    content = item.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{field}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise RequestError("must be a text or a list of text parts", field=f"{field}.content")
    return ChatMessage(cast(Literal["system", "user", "assistant"], role), content)


def _part(part: object, field: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise RequestError("only text parts are understood", field=field)
    return text
