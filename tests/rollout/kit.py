"""What the tests of the loop share: a policy behind real HTTP, a real shell, and agents to read a test by."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from prorl_gym.backends.pool import BackendPool
from prorl_gym.config.models import BackendConfig, PathsConfig, RuntimeConfig, SamplingDefaults, ToolConfig
from prorl_gym.resources.base import EpisodeOutcome, ResourcesServer, Verdict
from prorl_gym.rollout.episode import Episode
from prorl_gym.rollout.toolbox import Toolbox
from prorl_gym.runtimes.base import Runtime, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory
from prorl_gym.testing import ScriptedLlm
from prorl_gym.testing.byte_renderer import byte_renderer
from prorl_gym.tokens.recorder import Recorder
from prorl_gym.tokens.records import ChatMessage
from prorl_gym.tools.spec import ToolReply, ToolSpec
from prorl_gym.types import SamplingParams

RENDERER = byte_renderer()
ASK = [ChatMessage("user", "Go.")]


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@asynccontextmanager
async def no_timer(reason: str) -> AsyncIterator[None]:
    yield


class Counter(ResourcesServer):
    """A world with a counter: `add` counts, and the episode is over at three."""

    tools = (
        ToolSpec("add", "Add one.", {"type": "object", "properties": {}, "required": []}),
        ToolSpec("explode", "Raise.", {"type": "object", "properties": {}, "required": []}),
    )

    def __init__(self) -> None:
        self.count = 0

    async def call_tool(self, session_id: str, name: str, arguments: Mapping[str, Any]) -> ToolReply:
        if name == "explode":
            raise RuntimeError("the world is broken")
        self.count += 1
        return ToolReply(str(self.count), done=self.count == 3)

    async def verify(self, session_id: str, row: Mapping[str, Any], outcome: EpisodeOutcome) -> Verdict:
        return Verdict(float(self.count))


@asynccontextmanager
async def local_shell(state: Path, network: Literal["none", "host"] = "none") -> AsyncIterator[Runtime]:
    """A started sandbox without isolation."""
    paths = PathsConfig(state=state, images=state / "images")
    factory = RuntimeFactory(RuntimeConfig(kind="local"), paths)
    await factory.prepare({"local"})
    try:
        async with factory.create(SandboxSpec("local", network=network)) as runtime:
            yield runtime
    finally:
        await factory.stop()


@asynccontextmanager
async def episode_on(
    llm: ScriptedLlm,
    *,
    tools: Sequence[str] = (),
    runtime: Runtime | None = None,
    resources: Counter | None = None,
    recorder: Recorder | None = None,
    max_turns: int = 8,
    sampling: Mapping[str, Any] | None = None,
    events: list[tuple[str, dict[str, Any]]] | None = None,
    **tool_config: Any,
) -> AsyncIterator[Episode]:
    """An episode whose policy is `llm`."""
    pool = BackendPool(BackendConfig(), "default")
    await pool.start()
    try:
        await pool.add(llm.address, policy_version=7, dialect=None, model=None, api_key_env=None)
        async with pool.session("job", no_timer) as session:
            yield Episode(
                {"question": "Go."},
                recorder=recorder or Recorder(),
                renderer=RENDERER,
                session=session,
                toolbox=Toolbox(
                    ToolConfig(**tool_config),
                    tools,
                    runtime=runtime,
                    resources=resources,
                    session_tools=() if resources is None else resources.tools,
                ),
                sampling=SamplingParams.model_validate({"max_tokens": 400, **(sampling or {})}),
                defaults=SamplingDefaults(),
                max_turns=max_turns,
                emit=lambda event, **fields: None if events is None else events.append((event, fields)),
            )
    finally:
        await pool.stop()


def tool_texts(recorder: Recorder) -> list[str]:
    """What the model was told by its tools."""
    return [m["content"] for m in recorder.messages(token_ids=False) if m["role"] == "tool"]
