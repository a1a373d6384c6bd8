"""A complete rollout in one process: a scripted policy over HTTP, an unisolated shell, every token on record."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from prorl_gym.backends.pool import BackendPool
from prorl_gym.config.models import BackendConfig, PathsConfig, RuntimeConfig, SamplingDefaults, ToolConfig
from prorl_gym.rollout.episode import Episode
from prorl_gym.rollout.loop import run_loop
from prorl_gym.rollout.toolbox import Toolbox
from prorl_gym.runtimes.base import SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory
from prorl_gym.testing import Reply, ScriptedLlm
from prorl_gym.testing.byte_renderer import byte_renderer
from prorl_gym.tokens.recorder import Recorder
from prorl_gym.tokens.records import ChatMessage
from prorl_gym.types import SamplingParams

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo $((6 * 7))"}}\n</tool_call>'


@asynccontextmanager
async def waiting(reason):
    yield


async def main(state: Path) -> None:
    recorder, renderer, pool = Recorder(), byte_renderer(), BackendPool(BackendConfig(), "default")
    sandboxes = RuntimeFactory(RuntimeConfig(kind="local"), PathsConfig(state=state, images=state))
    await sandboxes.prepare({"local"})
    async with ScriptedLlm([Reply(text=CALL), Reply(text="It is 42.")]) as llm:
        await pool.add(llm.address, policy_version=1)
        async with sandboxes.create(SandboxSpec("local")) as sandbox, pool.session("hello", waiting) as policy:
            tools = Toolbox(ToolConfig(), ["bash"], runtime=sandbox)
            limits = {"sampling": SamplingParams(), "defaults": SamplingDefaults(max_tokens=200), "max_turns": 4}
            episode = Episode({}, recorder=recorder, renderer=renderer, session=policy, toolbox=tools, **limits)
            print("stop reason:", await run_loop(episode, [ChatMessage("user", "What is 6 times 7? Use bash.")]))
        await pool.stop()
    await sandboxes.stop()
    for message in recorder.messages():
        print(f"{message['role']:>9}, {len(message['token_ids'])} tokens: {message['content']!r}")


with TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder)))
