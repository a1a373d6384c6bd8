"""What graders read of an episode: plain chat messages, no tokens."""

import json
from typing import Any

from prorl_gym.tokens.recorder import Recorder


def chat_transcript(recorder: Recorder) -> list[dict[str, Any]]:
    """The main agent's conversation as OpenAI chat messages; a malformed call is left out, its text is in content."""
    return [_chat_message(m) for m in recorder.messages(token_ids=False) if m["agent"] == "main"]


def last_answer(recorder: Recorder) -> str:
    """Text of the main agent's last message, reasoning removed; "" when it said nothing."""
    for message in reversed(recorder.messages(token_ids=False)):
        if message["role"] == "assistant" and message["agent"] == "main":
            return str(message["content"] or "")
    return ""


def _chat_message(message: dict[str, Any]) -> dict[str, Any]:
    chat = {"role": message["role"], "content": message["content"]}
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for call in message.get("tool_calls", ())
        if call["arguments"] is not None
    ]
    if calls:
        chat["tool_calls"] = calls
    for key in ("tool_call_id", "name"):
        if key in message:
            chat[key] = message[key]
    return chat
