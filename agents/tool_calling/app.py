"""The default scaffold: the row's own question, the tools of the configuration, the one multi-turn loop.

`prompt.system` is the system text, `prompt.instruction` stands below the question of a row that is no conversation
already. A row that brings a system message keeps it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, StrictUndefined, TemplateError

from prorl_gym.errors import ConfigError
from prorl_gym.rollout.agent import Agent, AgentContext
from prorl_gym.rollout.rows import row_conversation, row_question
from prorl_gym.tokens.records import ChatMessage
from prorl_gym.tools.spec import ToolSpec

DEFAULTS = {"system": "You are a careful assistant that solves tasks step by step.", "instruction": ""}


class ToolCallingAgent(Agent):
    """Renders `prompt.jinja2`; row text reaches it as a variable only."""

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context)
        path = context.folder / "prompt.jinja2"
        self._values = {**DEFAULTS, **context.config.prompt}
        try:
            self._system = Environment(undefined=StrictUndefined, autoescape=False).from_string(path.read_text())  # noqa: S701
            self._system.render(self._values, row={}, tools=())
        except (OSError, TemplateError) as error:
            raise ConfigError(f"{context.name}: {path} does not render: {error}") from error

    def first_messages(self, row: Mapping[str, Any], tools: Sequence[ToolSpec]) -> list[ChatMessage]:
        """Our system message, unless the row has one, and what the row asks."""
        messages = row_conversation(row)
        if messages is None:
            asked = (row_question(row), self._values["instruction"])
            messages = [ChatMessage("user", "\n\n".join(filter(None, asked)))]
        if any(message.role == "system" for message in messages):
            return messages
        system = self._system.render(self._values, row=row, tools=tools).strip()
        return [ChatMessage("system", system), *messages] if system else messages
