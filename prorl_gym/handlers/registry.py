"""Which handler serves which task.

The invariant: a name means one handler. Names come from configured environments, from `handlers` in the configuration
and from installed packages' entry points; two that claim one name are an error at start.
"""

import importlib
import logging
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from prorl_gym.config.models import Environment, ProrlConfig
from prorl_gym.errors import ConfigError, UnknownTask
from prorl_gym.handlers.base import AgentHandler, HandlerContext
from prorl_gym.types import JobRequest

logger = logging.getLogger("prorl_gym.handlers")

ENTRY_POINT_GROUP = "prorl_gym.handlers"
AGENT_SUFFIX = "_agent"


class HandlerRegistry:
    """All tasks of a service, by name.

    Args:
        make_context: What the handler of a task is lent.

    Raises:
        ConfigError: A class cannot be loaded or made, or two tasks claim one name.
    """

    def __init__(self, config: ProrlConfig, make_context: Callable[[str], HandlerContext]) -> None:
        self._environments = config.environments
        self._data_sets = dict(config.task_aliases)
        self._make_context = make_context
        self._handlers: dict[str, AgentHandler] = {}
        self._aliases: dict[str, str] = {}
        self._started: list[tuple[str, AgentHandler]] = []
        self._load(config)
        self._name_aliases()

    def resolve(self, request: JobRequest) -> tuple[str, AgentHandler]:
        """The task that a request names and its handler.

        The name is `task`, else `instance.agent_ref.name`, else `instance.data_source`, which may stand for another
        task in `task_aliases`; `_agent` may be left off.

        Raises:
            UnknownTask: Lists the known ones.
        """
        name, field = self._named(request)
        task = self._aliases.get(name, name)
        handler = self._handlers.get(task)
        if handler is None:
            known = ", ".join(self.names()) or "none"
            more = "the service's 'environment=[...]' adds to them"
            raise UnknownTask(f"no task {name!r}; known: {known} ({more})", field=field)
        return task, handler

    def names(self) -> list[str]:
        """Every task, sorted."""
        return sorted(self._handlers)

    def environments(self) -> list[Environment]:
        """The tasks that come from the environments in config, in its order."""
        return list(self._environments)

    async def start(self) -> None:
        """Start every handler; when one fails, those already started are stopped. A second call starts what is not.

        Raises:
            ConfigError: A handler did not start; names its task.
        """
        running = {task for task, _ in self._started}
        for task, handler in self._handlers.items():
            if task in running:
                continue
            try:
                await handler.start()
            except Exception as error:
                await self.stop()
                raise ConfigError(f"task {task!r} did not start: {error}") from error
            except BaseException:
                await self.stop()
                raise
            self._started.append((task, handler))

    async def stop(self) -> None:
        """Stop every handler, the last started first; idempotent. One that fails is logged and holds up no other."""
        while self._started:
            task, handler = self._started.pop()
            try:
                await handler.stop()
            except Exception:
                logger.exception("task %r did not stop cleanly", task)

    def _load(self, config: ProrlConfig) -> None:
        if config.environments:
            from prorl_gym.handlers.environment import EnvironmentHandler

            for environment in config.environments:
                self._add(environment.name, EnvironmentHandler, "environments")
        for task, path in config.handlers.items():
            self._add(task, _load_path(task, path), f"handlers.{task}")
        for point in entry_points(group=ENTRY_POINT_GROUP):
            if config.handlers.get(point.name) == point.value:
                continue  # the same class, named twice
            self._add(point.name, _load_entry_point(point), f"entry point of {_distribution(point)}")

    def _add(self, task: str, handler_class: type[AgentHandler], source: str) -> None:
        if task in self._handlers:
            raise ConfigError(f"{source}: task {task!r} is there already; each name means one handler")
        try:
            self._handlers[task] = handler_class(self._make_context(task))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{source}: {handler_class.__name__} cannot be made: {error}") from error

    def _name_aliases(self) -> None:
        for task in self._handlers:
            alias = task.removesuffix(AGENT_SUFFIX)
            if alias == task or not alias:
                continue
            if alias in self._handlers:
                raise ConfigError(
                    f"task {alias!r} clashes with {task!r}, which may be called {alias!r} too; rename one"
                )
            self._aliases[alias] = task
        for data_set, task in self._data_sets.items():
            resolved = self._aliases.get(task, task)
            if data_set in self._handlers and resolved != data_set:
                raise ConfigError(f"task_aliases.{data_set}: there is a task of that name itself")

    def _named(self, request: JobRequest) -> tuple[str, str]:
        """The name in a request, and the field it stands in."""
        if request.task is not None:
            return request.task, "task"
        reference = request.instance.get("agent_ref")
        if isinstance(reference, Mapping) and isinstance(reference.get("name"), str):
            return reference["name"], "instance.agent_ref.name"
        data_source = request.instance.get("data_source")
        if isinstance(data_source, str):
            return self._data_sets.get(data_source, data_source), "instance.data_source"
        known = ", ".join(self.names()) or "none"
        message = f"name a task: `task`, `instance.agent_ref.name` or `instance.data_source`; known: {known}"
        raise UnknownTask(message, field="task")


def _load_path(task: str, path: str) -> type[AgentHandler]:
    key = f"handlers.{task}"
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"{key}: {path!r} is not of the form package.module:Class")
    try:
        loaded = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        raise ConfigError(f"{key}: {path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return _checked(loaded, key)


def _load_entry_point(point: EntryPoint) -> type[AgentHandler]:
    key = f"entry point {point.name!r} of {_distribution(point)}"
    try:
        loaded = point.load()
    except Exception as error:
        raise ConfigError(f"{key}: {point.value!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return _checked(loaded, key)


def _checked(loaded: Any, key: str) -> type[AgentHandler]:
    if not (isinstance(loaded, type) and issubclass(loaded, AgentHandler)):
        raise ConfigError(f"{key}: {loaded!r} is no AgentHandler class")
    return loaded


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"
