"""Handlers and pipelines small enough to read a test by."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prorl_gym.config.models import PathsConfig, PipelineConfig, PoolConfig, ProrlConfig, ResultsConfig
from prorl_gym.errors import UnknownTask
from prorl_gym.handlers.base import AgentHandler, EvalOutput, HandlerContext, Job, Prepared, RunOutput
from prorl_gym.pipeline import Outcome, Pipeline, Ticket
from prorl_gym.tokens.records import ChatMessage, Generation, Parsed, Rendered, VersionSpan
from prorl_gym.types import JobRequest, StopReason

PATHS = PathsConfig(state=Path("state"), images=Path("images"))


def config_of(*, pools: tuple[int, int, int] = (4, 4, 4), results: dict[str, Any] | None = None, **pipeline: Any):
    init, run, evaluate = (PoolConfig(workers=workers) for workers in pools)
    settings = {"cancel_grace_s": 0.2, **pipeline}
    return ProrlConfig(
        paths=PATHS,
        pipeline=PipelineConfig(init=init, run=run, eval=evaluate, **settings),
        results=ResultsConfig(**(results or {})),
    )


def context_of(task: str = "t") -> HandlerContext:
    return HandlerContext(task, config_of(), policy=lambda name: None, sandbox=lambda spec: None)  # type: ignore[arg-type,return-value]


class Quick(AgentHandler):
    """Does nothing, at once; tests override what they are about."""

    def __init__(self) -> None:
        super().__init__(context_of())

    async def init(self, job: Job) -> Prepared:
        return Prepared()

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        return RunOutput(StopReason.ANSWERED, answer="42")

    async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
        return EvalOutput(1.0, resolved=True)


class Staged(Quick):
    """Stops in the stages that a test names until it is let on."""

    def __init__(self, *held: str) -> None:
        super().__init__()
        self.inside = {stage: asyncio.Event() for stage in ("init", "run", "eval")}
        self.go = {stage: asyncio.Event() for stage in ("init", "run", "eval")}
        for stage in self.go.keys() - set(held):
            self.go[stage].set()
        self.ended: list[str] = []

    async def _pass(self, stage: str) -> None:
        self.inside[stage].set()
        try:
            await self.go[stage].wait()
        finally:
            self.ended.append(stage)

    async def init(self, job: Job) -> Prepared:
        await self._pass("init")
        return await super().init(job)

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        record_turn(job)
        await self._pass("run")
        return await super().run(job, prepared)

    async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
        await self._pass("eval")
        return await super().eval(job, run_output)


class Sandbox:
    """Something that must be stopped, and knows how many of its kind live."""

    def __init__(self, live: "Live", *, stop_s: float = 0.0) -> None:
        self._live = live
        self._stop_s = stop_s
        self.stops = 0
        live.now += 1
        live.most = max(live.most, live.now)

    async def stop(self) -> None:
        self.stops += 1
        if self._stop_s:
            await asyncio.sleep(self._stop_s)
        if self.stops == 1:
            self._live.now -= 1


class Live:
    def __init__(self) -> None:
        self.now = 0
        self.most = 0


class OneHandler:
    """A registry of whatever handlers a test has made."""

    def __init__(self, **handlers: AgentHandler) -> None:
        self._handlers = handlers

    def resolve(self, request: JobRequest) -> tuple[str, AgentHandler]:
        task = request.task or ""
        if task not in self._handlers:
            raise UnknownTask(f"no task {task!r}; known: {', '.join(self._handlers)}", field="task")
        return task, self._handlers[task]


def request_of(task: str = "t", **fields: Any) -> JobRequest:
    return JobRequest.model_validate({"task": task, "instance": {"instance_id": "row-1"}, **fields})


async def ended(ticket: Ticket, timeout_s: float = 10.0) -> Outcome:
    outcome = await ticket.wait(timeout_s)
    assert outcome is not None, f"job {ticket.id} is still {ticket.status} after {timeout_s} s"
    return outcome


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        await asyncio.sleep(0.002)


def record_turn(job: Job, text: str = "thinking aloud") -> None:
    job.recorder.add_messages([ChatMessage("user", "question")])
    generation = Generation([7, 8], [-0.1, -0.2], "stop", (VersionSpan(0, 2, 3),), "http://engine")
    job.recorder.add_call(
        Rendered([1, 2, 3], ((0, 3),)), generation, Parsed(ChatMessage("assistant", text), complete=True)
    )


def idle(pipeline: Pipeline) -> bool:
    """True when nothing is in or before any stage and no slot or allowance is taken."""
    now = pipeline.snapshot()
    counts = (now.init_queue, now.run_queue, now.eval_queue, now.active_init, now.active_run, now.active_eval)
    return not any(counts) and now.pools["ready_ahead"]["taken"] == 0
