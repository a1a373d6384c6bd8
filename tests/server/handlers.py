"""Small task families that the server's tests configure by dotted name."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from typing import Any

from prorl_gym.handlers.base import AgentHandler, EvalOutput, HandlerContext, Job, Prepared, RunOutput
from prorl_gym.runtimes.base import SandboxSpec
from prorl_gym.tokens.records import ChatMessage, Generation, Parsed, Rendered, VersionSpan
from prorl_gym.types import StopReason


def _answered(**fields: Any) -> RunOutput:
    return RunOutput(stop_reason=StopReason.ANSWERED, **fields)


class NoOp(AgentHandler):
    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        return _answered()

    async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
        return EvalOutput(reward=1.0, resolved=True)


class Held(NoOp):
    """Stays in RUN until the test lets go; says hello first."""

    def __init__(self, context: HandlerContext) -> None:
        super().__init__(context)
        self.free = asyncio.Event()
        self.entered = 0

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        job.recorder.add_messages([ChatMessage("user", "hello")])
        job.emit("greeting", text="hello\nworld")
        self.entered += 1
        await self.free.wait()
        return _answered()


class Slow(NoOp):
    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        await asyncio.sleep(job.request.instance.get("seconds", 600))
        return _answered()


class Talk(NoOp):
    """Records `turns` calls of `tokens` sampled ids each."""

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        turns, tokens = job.request.instance.get("turns", 2), job.request.instance.get("tokens", 3)
        ids: list[int] = []
        for turn in range(turns):
            job.recorder.add_messages([ChatMessage("user", f"turn {turn}")])
            prompt = [*ids, 1000 + turn]
            sampled = list(range(tokens))
            generation = Generation(
                output_ids=sampled,
                logprobs=[-0.5] * tokens,
                versions=(VersionSpan(0, tokens, 7),),
                finish_reason="stop",
                backend="http://nowhere",
                latency_s=0.0,
            )
            job.recorder.add_call(
                Rendered(prompt, (), bool(ids)), generation, Parsed(ChatMessage("assistant", "hm"), True)
            )
            ids = [*prompt, *sampled]
        return _answered()


class Odd(NoOp):
    """Gives back everything that JSON cannot say."""

    async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
        deep: Any = None
        for _ in range(2000):
            deep = [deep]
        odd = {"nan": math.nan, "text": "\ud800x", "long": 1 << 80, "deep": deep, "raw": b"\xff", 7: object()}
        return EvalOutput(reward=job.request.instance.get("reward", math.inf), components=odd)


class Stuck(NoOp):
    """Holds the event loop."""

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        time.sleep(600)
        return _answered()


class Child:
    """A process that a job leaves running, as a sandbox would be."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGKILL)
            await self.process.wait()


class Clinging:
    """Takes longer to stop than anybody wants to wait."""

    async def stop(self) -> None:
        await asyncio.sleep(9)


class Stubborn(NoOp):
    async def init(self, job: Job) -> Prepared:
        return Prepared(runtime=Clinging())

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        await asyncio.sleep(600)
        return _answered()


class WithChild(NoOp):
    """Has a child process while in RUN, whose pid it emits."""

    async def init(self, job: Job) -> Prepared:
        child = Child()
        job.adopt(child)
        child.process = await asyncio.create_subprocess_exec("sleep", "600")
        job.emit("child", pid=child.process.pid)
        return Prepared(runtime=child)

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        await asyncio.sleep(600)
        return _answered()


class Sandboxed(NoOp):
    """Sleeps in a real sandbox."""

    async def init(self, job: Job) -> Prepared:
        runtime = self.context.sandbox(SandboxSpec(kind=self.context.config.runtime.kind, job_id=job.id))
        job.adopt(runtime)
        await runtime.start()
        job.emit("sandbox", pid=runtime.describe().pid)
        return Prepared(runtime=runtime)

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        await prepared.runtime.call("bash", {"command": "sleep 600"}, timeout_s=600)
        return _answered()
