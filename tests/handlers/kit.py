"""A whole service without its HTTP face: real policy calls, real sandboxes, any environment."""

import json
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prorl_gym.backends.registry import BackendRegistry
from prorl_gym.config.models import AgentConfig, Environment, ProrlConfig
from prorl_gym.handlers.base import HandlerContext
from prorl_gym.handlers.registry import HandlerRegistry
from prorl_gym.handlers.web import web_tools
from prorl_gym.pipeline import Pipeline
from prorl_gym.rollout.policy import Policy
from prorl_gym.runtimes.factory import RuntimeFactory
from prorl_gym.testing import ScriptedLlm
from prorl_gym.testing.byte_renderer import byte_renderer
from prorl_gym.tools.web.tools import WebTools
from prorl_gym.types import JobRequest

ROOT = Path(__file__).parents[2]
RENDERER = byte_renderer()


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def environment(agent: Mapping[str, Any] | None = None, **fields: Any) -> Environment:
    """The `world` under the default agent, unless told otherwise."""
    return Environment(
        **{
            "name": "world_agent",
            "agent_type": "tool_calling",
            "agent": AgentConfig.model_validate({"tools": ["bash"], **(agent or {})}),
            "resources_type": "world",
            "resources_name": "world",
            **fields,
        }
    )


def config_of(folder: Path, served: Environment, **groups: Any) -> ProrlConfig:
    """One environment, sandboxes without isolation, the world beside what the checkout ships."""
    world = folder / "root" / "resources_servers" / "world"
    world.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("world.py"), world / "app.py")
    return ProrlConfig.model_validate(
        {
            "environments": (served,),
            "runtime": {"kind": "local"},
            "paths": {"state": folder / "state", "images": folder / "images"},
            "roots": (folder / "root", ROOT),
            **groups,
        }
    )


def registry_of(
    config: ProrlConfig, policy: Callable[[str], Any], runtimes: RuntimeFactory, web: WebTools | None = None
) -> HandlerRegistry:
    return HandlerRegistry(config, lambda task: HandlerContext(task, config, policy, runtimes.create, web))


@asynccontextmanager
async def serving(config: ProrlConfig, *backends: ScriptedLlm) -> AsyncIterator[Pipeline]:
    """The service's parts, up and wired."""
    engines = BackendRegistry(config.backend)
    runtimes = RuntimeFactory(config.runtime, config.paths)
    policies: dict[str, Policy] = {}

    def policy(name: str) -> Policy:
        if name not in policies:
            policies[name] = Policy(name, config.policy, engines.pool(name), load=lambda *_: RENDERER)
        return policies[name]

    web = web_tools(config)
    handlers = registry_of(config, policy, runtimes, web)
    pipeline = Pipeline(config, handlers)
    await runtimes.prepare({config.runtime.kind})
    await engines.start()
    try:
        if web is not None:
            await web.start()
        await handlers.start()
        for backend in backends:
            await engines.pool("default").add(
                backend.address, policy_version=3, dialect=None, model=None, api_key_env=None
            )
        await pipeline.start()
        yield pipeline
    finally:
        await pipeline.stop()
        await handlers.stop()
        if web is not None:
            await web.stop()
        await runtimes.stop()
        await engines.stop()


def ask(**row: Any) -> JobRequest:
    """A job of the world."""
    fields = {name: row.pop(name) for name in ("job_id", "timeout_s") if name in row}
    row = {"question": "Do it.", "goal": "g", **row}
    return JobRequest(task="world", instance=row, sampling_params={"max_tokens": 300}, **fields)
