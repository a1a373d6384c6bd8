"""AgentHandler: what a task family writes, and the Job that it is handed.

Source: three-stage interface of arXiv 2603.18815, listing 1.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from prorl_gym.config.models import ProrlConfig
from prorl_gym.errors import Stage
from prorl_gym.runtimes.base import Runtime, SandboxSpec
from prorl_gym.tokens.recorder import Recorder
from prorl_gym.tools.web.tools import WebTools
from prorl_gym.types import JobRequest, StopReason

_job_logger = logging.getLogger("prorl_gym.job")

Lifetime = Literal["stage", "end"]
"""How long an adopted resource lives; see `Job.adopt`."""


@runtime_checkable
class Stoppable(Protocol):
    """Anything a stage leaves running that the pipeline must end."""

    async def stop(self) -> None:
        """End it; idempotent."""
        ...


class Prepared(NamedTuple):
    """What INIT hands to RUN."""

    runtime: Stoppable | None = None
    """Stopped by the pipeline when RUN ends, however it ends."""
    metadata: Any = None
    config: Any = None


@dataclass(frozen=True, slots=True)
class RunOutput:
    """What RUN hands to EVAL: everything scoring needs, since the sandbox is gone by then."""

    stop_reason: StopReason
    answer: str = ""
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    git_patch: str | None = None
    metadata: Any = None
    error: Exception | None = None
    """Set when RUN broke and this is what was left of it."""


@dataclass(frozen=True, slots=True)
class EvalOutput:
    """How the job scored; `reward=None` or `masked` when it is no measurement."""

    reward: float | None
    resolved: bool | None = None
    components: Mapping[str, Any] = field(default_factory=dict)
    masked: bool = False
    failure_kind: str | None = None
    failure_reason: str | None = None


class Job:
    """One job as its handler sees it.

    Attributes:
        id: The job's id.
        task: Resolved task name.
        request: What was asked; `request.instance` is the untrusted row.
        recorder: Turns go here as they happen; survives whatever ends the job.
        log: Stamped with job id and stage.
    """

    def __init__(self, job_id: str, task: str, request: JobRequest, hooks: "JobHooks") -> None:
        self.id = job_id
        self.task = task
        self.request = request
        self.recorder = Recorder()
        self.log = logging.LoggerAdapter(_job_logger, {"job_id": job_id})
        self._hooks = hooks

    @asynccontextmanager
    async def waiting(self, reason: str) -> AsyncIterator[None]:
        """Stop the job's timer while the block lasts: for a person, a backend, anything that is not the job's work."""
        async with self._hooks.pause_timer(reason):
            yield

    def emit(self, event: str, **fields: Any) -> None:
        """Publish progress on `/jobs/{id}/events`; cheap, never blocks, fields are JSON-serialisable."""
        self._hooks.emit(event, fields)

    def adopt(self, resource: Stoppable, *, until: Lifetime = "stage") -> None:
        """Have the pipeline stop `resource`, however the job ends.

        Call it *before* starting the resource, so that a cancel in the middle of the start leaves nothing behind.

        Args:
            resource: Stopped once; a second adoption of the same is harmless.
            until: `stage` is the end of the current stage's scope, INIT's being that of RUN; `end` is the job's end.
        """
        self._hooks.adopt(resource, until)

    def warn(self, message: str) -> None:
        """Add a line to the result's `warnings`."""
        self._hooks.warn(message)


class JobHooks(Protocol):
    """How a Job reaches the pipeline that runs it."""

    def pause_timer(self, reason: str) -> AbstractAsyncContextManager[None]:
        """See `Job.waiting`."""
        ...

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        """See `Job.emit`."""
        ...

    def adopt(self, resource: Stoppable, until: Lifetime) -> None:
        """See `Job.adopt`."""
        ...

    def warn(self, message: str) -> None:
        """See `Job.warn`."""
        ...


@dataclass(frozen=True, slots=True)
class HandlerContext:
    """What the service lends every handler, once.

    Attributes:
        task: Name under which this handler is registered.
        config: The whole, frozen configuration.
        policy: `policy(name)` gives that policy's models and renderers; see `prorl_gym.rollout.policy.Policy`.
        sandbox: Makes a runtime, not yet started, from a spec.
        web: The web tools, where an environment names them.
    """

    task: str
    config: ProrlConfig
    policy: Callable[[str], Any]
    sandbox: Callable[[SandboxSpec], Runtime]
    web: WebTools | None = None


class AgentHandler(ABC):
    """Task-family code for the three stages.

    Each of the methods may be `async def` or plain `def`; a plain one runs in a thread. One instance serves all jobs
    of its task at once, so state belongs into what the stages return. Exceptions are data: they end the job, not the
    worker.

    A stage is cut by cancelling it; then it has `pipeline.cancel_grace_s` to end. Neither a thread nor an `async def`
    that never awaits can be interrupted: the one is listed as left over and its slot freed, the other holds every job
    up and is named in the log, so what blocks belongs into a plain `def`.
    """

    def __init__(self, context: HandlerContext) -> None:
        self.context = context

    async def start(self) -> None:
        """Once, before the first job. Raises ConfigError when the configuration cannot work."""

    async def stop(self) -> None:
        """Once, after the last job; idempotent."""

    def check(self, request: JobRequest) -> None:
        """Refuse a request at submit.

        Raises:
            RequestError: Names the field and the fix.
        """

    def init(self, job: Job) -> Prepared | Awaitable[Prepared]:
        """Prepare: start the sandbox, seed the session."""
        return Prepared()

    @abstractmethod
    def run(self, job: Job, prepared: Prepared) -> RunOutput | Awaitable[RunOutput]:
        """Let the agent act; record turns into `job.recorder`; capture what scoring needs."""

    @abstractmethod
    def eval(self, job: Job, run_output: RunOutput) -> EvalOutput | Awaitable[EvalOutput]:
        """Score. The RUN sandbox is already gone."""

    def init_exception(self, job: Job, error: Exception) -> Awaitable[None] | None:
        """INIT failed; the job ends with a failed result after this."""
        return None

    def run_exception(self, job: Job, error: Exception) -> RunOutput | Awaitable[RunOutput | None] | None:
        """RUN failed. Returns what EVAL should see, or None for the default: what was recorded, with the error."""
        return None

    def eval_exception(self, job: Job, error: Exception) -> EvalOutput | Awaitable[EvalOutput | None] | None:
        """EVAL failed. Returns a verdict all the same, or None for the default: no measurement."""
        return None

    def final_result(self, job: Job, result: dict[str, Any]) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        """Last look at the result's own fields (`reward_components`, `artifacts`, ...) before it is kept."""
        return result


StageMethod = Callable[..., Any]
STAGES: tuple[Stage, ...] = ("init", "run", "eval")
