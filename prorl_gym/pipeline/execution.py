"""One job on its way through the stages.

The invariant: however a job ends, its ticket gets exactly one outcome, every slot it held is free again, and what INIT
and RUN left running has been stopped before EVAL begins.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from prorl_gym.config.models import PipelineConfig
from prorl_gym.errors import HandlerError, JobError, Stage, StageTimeout
from prorl_gym.handlers.base import AgentHandler, Job, Lifetime, Prepared, RunOutput, Stoppable
from prorl_gym.pipeline.calls import CallFacilities, HandlerCall, OutOfTime, as_job_error, is_default
from prorl_gym.pipeline.gate import Gate
from prorl_gym.pipeline.outcome import JobFailure, Outcome, Score
from prorl_gym.pipeline.scope import ResourceScope
from prorl_gym.pipeline.scoring import score_of
from prorl_gym.pipeline.slot import StageSlot
from prorl_gym.pipeline.stage_times import StageTimes
from prorl_gym.pipeline.ticket import Ticket
from prorl_gym.pipeline.timer import PausableTimer, Pause
from prorl_gym.tokens.trajectory import Trajectory
from prorl_gym.types import JobStatus, StopReason

logger = logging.getLogger("prorl_gym.pipeline")

CALLBACK_S = 30.0
"""For one call of `*_exception` or `final_result`; no budget counts it."""
MAX_WARNINGS = 100
_MASKED = Score()


@dataclass(frozen=True, slots=True)
class Shared:
    """What the jobs of one pipeline have in common.

    Attributes:
        gates: One per stage; INIT's also bounds the sandboxes that are started and not yet in RUN.
        moved: Told of every change of a job's status: (from, to).
        ended: Told of every job that has its outcome, and of that.
        provenance: Goes into every result.
    """

    config: PipelineConfig
    gates: Mapping[Stage, Gate]
    calls: CallFacilities
    moved: Callable[[JobStatus, JobStatus], None]
    ended: Callable[[Ticket, Outcome], None]
    provenance: Mapping[str, Any]


class Execution:
    """The job behind a ticket; lives until its outcome is there and everything of it has been stopped."""

    def __init__(self, ticket: Ticket, handler: AgentHandler, shared: Shared) -> None:
        request = ticket.request
        self._ticket = ticket
        self._handler = handler
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._job = Job(ticket.id, ticket.task, request, self)
        self._timer = PausableTimer(request.timeout_s or shared.config.timeout_s)
        self._scope = ResourceScope(ticket.id, shared.calls.leftovers, self._loop)
        self._whole_scope = ResourceScope(ticket.id, shared.calls.leftovers, self._loop)
        self._times = StageTimes()
        self._stage: Stage | None = None
        self._holds_allowance = False
        self._timed_out = False
        self._failure: JobFailure | None = None
        self._output: RunOutput | None = None
        self._score = _MASKED
        self._warnings: list[str] = []
        if request.sampling_params.ignored:
            self.warn("ignored in sampling_params: " + ", ".join(request.sampling_params.ignored))
        ticket.events.append("queued")
        self._task = self._loop.create_task(self._whole(), name=f"job {ticket.id}")

    @property
    def task(self) -> "asyncio.Task[None]":
        """Done once nothing of the job is left but what is listed as left over."""
        return self._task

    async def _whole(self) -> None:
        try:
            await self._through_the_stages()
            self._conclude(await self._after_the_hook(self._outcome()))
        except asyncio.CancelledError:
            self._conclude(self._cancelled("the event loop is ending"))  # changes nothing when it was `cancel`
            raise
        except Exception as error:
            logger.exception("the pipeline itself failed", extra={"job_id": self._ticket.id})
            self._fail(as_job_error(error, self._stage or "init"))
            self._score = _MASKED
            self._conclude(self._outcome())
        finally:
            self._timer.close()
            await self._whole_scope.close()

    async def _through_the_stages(self) -> None:
        try:
            async with self._in("init"):
                prepared = await self._init()
            if prepared is None:
                return
            async with self._in("run"), self._scope:
                output = await self._run(prepared)
        finally:
            try:
                await self._scope.close()
            finally:  # a cancel that comes while the sandbox stops is raised here
                self._give_allowance_back()
        if output is None:
            return
        self._scope = ResourceScope(self._ticket.id, self._shared.calls.leftovers, self._loop)
        async with self._in("eval"), self._scope:
            self._score = await self._eval(output)

    def _in(self, stage: Stage) -> StageSlot:
        return StageSlot(
            stage,
            self._shared.gates[stage],
            self._times,
            job_id=self._ticket.id,
            priority=self._ticket.request.priority,
            on_entry=self._arrive_in,
        )

    def _arrive_in(self, stage: Stage) -> None:
        if stage == "init":
            self._holds_allowance = True
        elif stage == "run":
            self._give_allowance_back()
        self._stage = stage
        self._job.log.extra = {"job_id": self._ticket.id, "stage": stage}
        self._move(JobStatus(stage))
        self._ticket.events.append(stage)

    def _give_allowance_back(self) -> None:
        if self._holds_allowance:
            self._holds_allowance = False
            self._shared.gates["init"].give_back()

    async def _init(self) -> Prepared | None:
        """What RUN works with; None when INIT failed."""
        budget = self._ticket.request.stage_timeouts_s.init
        try:
            prepared = await self._call_stage("init", budget, self._handler.init, self._job)
            if not isinstance(prepared, Prepared):
                raise HandlerError(f"init returned {type(prepared).__name__}, not Prepared", stage="init")
            if prepared.runtime is not None and not hasattr(prepared.runtime, "stop"):
                kind = type(prepared.runtime).__name__
                raise HandlerError(f"init returned a runtime, {kind}, without stop()", stage="init")
        except JobError as error:
            self._fail(error)
            await self._callback(self._handler.init_exception, error)
            return None
        return prepared

    async def _run(self, prepared: Prepared) -> RunOutput | None:
        """What EVAL is to see; None when there is nothing to score."""
        budget = self._ticket.request.stage_timeouts_s.run
        try:
            output = await self._call_stage("run", budget, self._handler.run, self._job, prepared)
            if not isinstance(output, RunOutput):
                raise HandlerError(f"run returned {type(output).__name__}, not RunOutput", stage="run")
        except JobError as error:
            self._fail(error)
            output = await self._callback(self._handler.run_exception, error)
            if not isinstance(output, RunOutput):
                output = self._what_was_recorded(error)
        else:
            if output.error is not None:
                self._fail(as_job_error(output.error, "run"))
        self._output = output
        if self._timed_out:
            if self._shared.config.on_run_timeout == "skip":
                return None
            self._timer.renew()
        return output

    def _what_was_recorded(self, error: JobError) -> RunOutput:
        said = [entry.message for entry in self.trajectory().entries if entry.message.role == "assistant"]
        reason = StopReason.TIMEOUT if self._timed_out else StopReason.ERROR
        return RunOutput(reason, answer=said[-1].content if said else "", error=error)

    async def _eval(self, output: RunOutput) -> Score:
        budget = self._ticket.request.stage_timeouts_s.eval
        try:
            verdict = await self._call_stage("eval", budget, self._handler.eval, self._job, output)
            score = score_of(verdict)
        except JobError as error:
            self._fail(error)
            verdict = await self._callback(self._handler.eval_exception, error)
            return self._despite(output, _MASKED if verdict is None else self._second_opinion(verdict))
        if verdict.failure_kind is not None:
            reason = str(verdict.failure_reason or verdict.failure_kind)
            self._fail(JobFailure("eval", str(verdict.failure_kind), reason))
        return self._despite(output, score)

    def _second_opinion(self, verdict: object) -> Score:
        try:
            return score_of(verdict)
        except JobError as error:
            self.warn(f"eval_exception: {error}")
            return _MASKED

    def _despite(self, output: RunOutput, score: Score) -> Score:
        """The score of an episode that broke: none where the infrastructure did, masked where it may have."""
        if output.error is None or self._timed_out:
            return score
        error = as_job_error(output.error, "run")
        if not error.infrastructure:
            return score
        return replace(score, masked=True, reward=score.reward if isinstance(error, HandlerError) else None)

    async def _call_stage(
        self, stage: Stage, budget_s: float | None, method: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Run a stage's method on the job's time.

        Raises:
            StageTimeout: Its budget, or the job's, is used up.
            JobError: Whatever else went wrong, with the stage named.
        """
        name = f"{self._ticket.task}.{stage} of job {self._ticket.id}"
        on_value = self._adopt_prepared if stage == "init" else None
        call = HandlerCall(self._shared.calls, self._ticket.id, name, method, *arguments, on_value=on_value)
        self._timer.enter(stage, budget_s, call.interrupt)
        try:
            return await call.value()
        except OutOfTime:
            self._timed_out = True
            raise StageTimeout(f"{stage} ran over {self._timer.overrun()}", stage=stage) from None
        except JobError as error:
            self._job.log.warning("%s failed: %s: %s", name, error.kind, error)
            as_job_error(error, stage)
            raise
        except Exception as error:
            self._job.log.exception("%s failed", name)
            raise as_job_error(error, stage) from error
        finally:
            self._timer.leave()

    def _adopt_prepared(self, prepared: object) -> None:
        """Whatever becomes of INIT, also when it answers after its time: its runtime is stopped."""
        runtime = prepared.runtime if isinstance(prepared, Prepared) else None
        if runtime is not None and hasattr(runtime, "stop"):
            self._scope.adopt(runtime)

    async def _callback(self, method: Callable[..., Any], error: JobError) -> Any:
        """What an exception callback returned; None when it has nothing to say, or breaks."""
        if is_default(method):
            return None
        try:
            return await self._call_in_bound(method, self._job, error)
        except Exception as broken:
            self._job.log.exception("%s failed", method.__name__)
            self.warn(f"{method.__name__} failed: {as_job_error(broken, self._stage or 'init')}")
            return None

    async def _after_the_hook(self, outcome: Outcome) -> Outcome:
        method = self._handler.final_result
        if is_default(method):
            return outcome
        try:
            return outcome.rewritten(await self._call_in_bound(method, self._job, outcome.rewritable()))
        except Exception as broken:
            self._job.log.exception("final_result failed")
            self.warn(f"final_result failed: {as_job_error(broken, 'eval')}")
            return replace(outcome, warnings=tuple(self._warnings))

    async def _call_in_bound(self, method: Callable[..., Any], *arguments: Any) -> Any:
        name = f"{self._ticket.task}.{method.__name__} of job {self._ticket.id}"
        call = HandlerCall(self._shared.calls, self._ticket.id, name, method, *arguments)
        bound = self._loop.call_later(CALLBACK_S, call.interrupt)
        try:
            return await call.value()
        except OutOfTime:
            raise TimeoutError(f"it took more than {CALLBACK_S:g} s") from None
        finally:
            bound.cancel()

    def _fail(self, error: JobError | JobFailure) -> None:
        """Record what broke first; what breaks later is a warning."""
        failure = JobFailure.of(error) if isinstance(error, JobError) else error
        if self._failure is None:
            self._failure = failure
        else:
            self.warn(f"{failure.stage or 'later'} failed too: {failure.message}")

    def cancel(self, reason: str) -> None:
        """See `Running.cancel`. The outcome is there at once; slots are freed when the handler and its sandbox end."""
        if self._conclude(self._cancelled(reason)):
            self._task.cancel()

    def _conclude(self, outcome: Outcome) -> bool:
        ticket = self._ticket
        before = ticket.status
        if not ticket.end(outcome):
            return False
        self._shared.moved(before, outcome.status)
        self._shared.ended(ticket, outcome)
        reason = None if outcome.stop_reason is None else outcome.stop_reason.value
        fields = {"reward": outcome.score.reward, "stop_reason": reason}
        ticket.events.append(outcome.status.value, fields, last=True)
        return True

    def _move(self, status: JobStatus) -> None:
        if self._ticket.outcome is None:
            self._shared.moved(self._ticket.status, status)
            self._ticket.status = status

    def trajectory(self) -> Trajectory:
        """What has been recorded so far."""
        return self._job.recorder.freeze()

    def _outcome(self) -> Outcome:
        failure, output = self._failure, self._output
        status = JobStatus.COMPLETED
        if self._timed_out:
            status = JobStatus.TIMEOUT
        elif failure is not None:
            status = JobStatus.FAILED
        reason = StopReason.TIMEOUT if self._timed_out else StopReason.ERROR
        return Outcome(
            job_id=self._ticket.id,
            task=self._ticket.task,
            request=self._ticket.request,
            status=status,
            stop_reason=reason if output is None else output.stop_reason,
            trajectory=self.trajectory(),
            timing=self._times.timing(self._timer, timed_out=self._timed_out),
            score=self._score,
            failure=failure,
            critical_error="timeout" if self._timed_out else None if failure is None else failure.stage,
            git_patch=None if output is None else output.git_patch,
            artifacts={} if output is None else output.artifacts,
            provenance=self._shared.provenance,
            warnings=tuple(self._warnings),
        )

    def _cancelled(self, reason: str) -> Outcome:
        return replace(
            self._outcome(),
            status=JobStatus.CANCELLED,
            stop_reason=StopReason.CANCELLED,
            score=_MASKED,
            failure=JobFailure(self._stage, "cancelled", reason),
            critical_error="cancelled",
        )

    def pause_timer(self, reason: str) -> Pause:
        """See `Job.waiting`."""
        return Pause(self._timer, lambda change: self.emit(change, {"reason": reason}))

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        """See `Job.emit`."""
        if threading.get_ident() == self._thread:
            self._ticket.events.append(event, fields)
        else:
            self._loop.call_soon_threadsafe(self._ticket.events.append, event, fields)

    def adopt(self, resource: Stoppable, until: Lifetime) -> None:
        """See `Job.adopt`."""
        scope = self._whole_scope if until == "end" else self._scope
        scope.adopt(resource)

    def warn(self, message: str) -> None:
        """See `Job.warn`."""
        if len(self._warnings) < MAX_WARNINGS:
            self._warnings.append(message)
