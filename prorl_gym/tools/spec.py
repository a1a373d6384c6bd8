"""What the model is told of a tool, and what a tool answers."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model sees it.

    Attributes:
        name: Unique within one episode.
        description: For the model.
        parameters: JSON schema of an object.
    """

    name: str
    description: str
    parameters: dict[str, Any]

    def schema(self) -> dict[str, Any]:
        """The OpenAI function schema that chat templates expect."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


@dataclass(frozen=True, slots=True)
class ToolReply:
    """What one call gave.

    A command that failed or ran out of time is a reply like any other; only a broken sandbox raises.

    Attributes:
        text: The observation for the model, already bounded.
        error: True when the call did not do what it says (bad arguments, non-zero status, timeout, unknown tool).
        timed_out: The call ran over its limit; `text` holds the output so far.
        done: The tool ended the episode (submit, or an environment that says it is over).
        exit_code: Status of a shell command; None for other tools or when it did not end.
        duration_s: Seconds inside the tool.
        details: Structured remainder for handlers and events, JSON-serialisable; never shown to the model.
    """

    text: str
    error: bool = False
    timed_out: bool = False
    done: bool = False
    exit_code: int | None = None
    duration_s: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
