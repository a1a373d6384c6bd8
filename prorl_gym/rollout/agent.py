"""What an agent scaffold is: a prompt, a tool set, rules to stop, and a loop it may replace."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prorl_gym.config.models import AgentConfig
from prorl_gym.tokens.records import ChatMessage
from prorl_gym.tools.spec import ToolSpec
from prorl_gym.types import StopReason

if TYPE_CHECKING:
    from prorl_gym.rollout.episode import Episode


@dataclass(frozen=True, slots=True)
class AgentContext:
    """What the service lends an agent, once: its instance name, its settings and the folder its code lies in."""

    name: str
    config: AgentConfig
    folder: Path


class Agent(ABC):
    """One scaffold. An instance serves many episodes at once; state lives in the episode."""

    def __init__(self, context: AgentContext) -> None:
        self.context = context

    @abstractmethod
    def first_messages(self, row: Mapping[str, Any], tools: Sequence[ToolSpec]) -> list[ChatMessage]:
        """The conversation the episode starts with. Row text is a template variable, never a template."""

    async def run(self, episode: "Episode") -> StopReason:
        """Act until the episode ends. The default is the one multi-turn loop; several loops make several agents."""
        from prorl_gym.rollout.loop import run_loop

        return await run_loop(episode, self.first_messages(episode.row, episode.tools))
