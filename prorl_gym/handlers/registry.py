"""Which handler serves which task."""

from collections.abc import Callable

from prorl_gym.config.models import Environment, ProrlConfig
from prorl_gym.handlers.base import AgentHandler, HandlerContext
from prorl_gym.types import JobRequest


class HandlerRegistry:
    """All tasks of a service, by name.

    Raises:
        ConfigError: A class cannot be loaded, or two tasks claim one name.
    """

    def __init__(self, config: ProrlConfig, make_context: Callable[[str], HandlerContext]) -> None:
        raise NotImplementedError

    def resolve(self, request: JobRequest) -> tuple[str, AgentHandler]:
        """The task that a request names and its handler.

        Raises:
            UnknownTask: Lists the known ones.
        """
        raise NotImplementedError

    def names(self) -> list[str]:
        """Every task, sorted."""
        raise NotImplementedError

    def environments(self) -> list[Environment]:
        """The tasks that come from config, in its order."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start every handler; when one fails, those already started are stopped."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stop every handler, in reverse order; idempotent."""
        raise NotImplementedError
