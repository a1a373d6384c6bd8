"""What breaks is recorded, named for its boundary, and never a reward."""

import asyncio
import logging
from typing import Any

import pytest

from prorl_gym.errors import BackendError, EvaluationError, HandlerError, JobError, RuntimeStartError, SandboxError
from prorl_gym.handlers.base import EvalOutput, Job, Prepared, RunOutput
from prorl_gym.types import JobResult, JobStatus, StopReason

from .kit import Live, Quick, Sandbox, ended, idle, record_turn, request_of, until


async def result_of(pipeline, **fields: Any) -> JobResult:
    outcome = await ended(pipeline.submit(request_of(**fields)))
    await until(lambda: idle(pipeline))
    return JobResult.model_validate(outcome.result())


def failing(stage: str, error: BaseException):
    async def fail(*_: object) -> None:
        raise error

    handler = Quick()
    setattr(handler, stage, fail)
    return handler


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RuntimeStartError("no image"), "runtime_start", "no image"),
        (ValueError("bad row"), "handler", "ValueError: bad row"),
        (KeyError("x"), "handler", "KeyError: 'x'"),
        (SystemExit(3), "handler", "called sys.exit(3)"),
        (asyncio.CancelledError(), "handler", "ended with CancelledError although nobody had cancelled the job"),
        (StopIteration(), "handler", "RuntimeError: coroutine raised StopIteration"),
        (TimeoutError(), "handler", "TimeoutError"),
    ],
)
async def test_a_failing_init_ends_the_job(serve, error, kind, message):
    result = await result_of(await serve(failing("init", error)))
    assert (result.status, result.critical_error, result.stop_reason) == (JobStatus.FAILED, "init", StopReason.ERROR)
    assert (result.failure.stage, result.failure.kind, result.failure.message) == ("init", kind, message)
    assert (result.reward, result.mask_sample, result.filter, result.error) == (None, True, True, message)
    assert set(result.timing.active) == {"init"}


@pytest.mark.parametrize("error", [SandboxError("gone"), BackendError("500")])
async def test_an_episode_that_the_infrastructure_broke_is_evaluated_but_never_gets_a_reward(serve, error):
    seen: list[RunOutput] = []

    class Broken(Quick):
        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            record_turn(job, "half an answer")
            raise error

        async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
            seen.append(run_output)
            return EvalOutput(0.0, components={"seen": True})

    result = await result_of(await serve(Broken()))
    assert (seen[0].answer, seen[0].error, seen[0].stop_reason) == ("half an answer", error, StopReason.ERROR)
    assert (result.status, result.critical_error, result.failure.kind) == (JobStatus.FAILED, "run", error.kind)
    assert (result.reward, result.mask_sample, result.reward_components) == (None, True, {"seen": True})
    assert result.segments[0].response_ids == [7, 8]


async def test_a_run_that_raised_something_foreign_is_scored_but_masked(serve, caplog):
    with caplog.at_level(logging.ERROR):
        result = await result_of(await serve(failing("run", ZeroDivisionError("oops"))))
    assert (result.status, result.reward, result.mask_sample) == (JobStatus.FAILED, 1.0, True)
    assert result.failure.message == "ZeroDivisionError: oops"
    [record] = [record for record in caplog.records if record.exc_info]
    assert record.exc_info[0] is ZeroDivisionError
    assert record.job_id == result.job_id


async def test_a_failure_that_is_the_agents_own_is_scored(serve):
    class AgentError(JobError):
        kind, infrastructure = "agent", False

    result = await result_of(await serve(failing("run", AgentError("gave up"))))
    assert (result.status, result.reward, result.mask_sample) == (JobStatus.FAILED, 1.0, False)
    assert result.failure.kind == "agent"


async def test_run_exception_decides_what_eval_sees(serve):
    class Recovering(Quick):
        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            raise ValueError("oops")

        async def run_exception(self, job: Job, error: Exception) -> RunOutput:
            assert isinstance(error, HandlerError) and isinstance(error.__cause__, ValueError)
            return RunOutput(StopReason.LOOP, answer="saved", git_patch="saved")

        async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
            return EvalOutput(0.25 if run_output.answer == "saved" else 0.0)

    result = await result_of(await serve(Recovering()))
    assert (result.reward, result.mask_sample, result.git_patch) == (0.25, False, "saved")
    assert (result.status, result.stop_reason) == (JobStatus.FAILED, StopReason.LOOP)


async def test_a_run_output_that_carries_an_error_is_a_failed_run(serve):
    class Carrying(Quick):
        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            return RunOutput(StopReason.ERROR, error=BackendError("died"))

    result = await result_of(await serve(Carrying()))
    assert (result.status, result.failure.kind, result.failure.stage) == (JobStatus.FAILED, "backend", "run")
    assert (result.reward, result.mask_sample) == (None, True)


@pytest.mark.parametrize(
    ("error", "kind"), [(EvaluationError("grader died"), "evaluation"), (OSError("disk"), "handler")]
)
async def test_a_failing_eval_is_no_measurement(serve, error, kind):
    result = await result_of(await serve(failing("eval", error)))
    assert (result.status, result.critical_error, result.failure.kind) == (JobStatus.FAILED, "eval", kind)
    assert (result.reward, result.mask_sample, result.stop_reason) == (None, True, StopReason.ANSWERED)


@pytest.mark.parametrize(
    ("stage", "returned", "kind", "says"),
    [
        ("init", None, "handler", "init returned NoneType, not Prepared"),
        ("init", (None, 1, 2), "handler", "init returned tuple, not Prepared"),
        ("init", Prepared(runtime="nothing to stop"), "handler", "without stop()"),  # type: ignore[arg-type]
        ("run", {"answer": 1}, "handler", "run returned dict, not RunOutput"),
        ("eval", 1.0, "handler", "eval returned float, not EvalOutput"),
        ("eval", EvalOutput(float("nan")), "evaluation", "the reward is nan"),
        ("eval", EvalOutput(float("inf")), "evaluation", "the reward is inf"),
        ("eval", EvalOutput("1.0"), "handler", "must be a number"),  # type: ignore[arg-type]
        ("eval", EvalOutput(1.0, components=[1]), "handler", "must be a mapping"),  # type: ignore[arg-type]
    ],
)
async def test_a_wrong_return_value_is_named_and_gives_no_reward(serve, stage, returned, kind, says):
    async def wrong(*_: object) -> Any:
        return returned

    handler = Quick()
    setattr(handler, stage, wrong)
    result = await result_of(await serve(handler))
    assert (result.status, result.critical_error, result.failure.kind) == (JobStatus.FAILED, stage, kind)
    assert says in result.failure.message
    assert result.mask_sample
    assert stage == "run" or result.reward is None


async def test_a_verdict_that_reports_a_failure_is_recorded_in_its_own_words(serve):
    class Reporting(Quick):
        async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
            return EvalOutput(None, masked=True, failure_kind="verifier_error", failure_reason="no tests found")

    result = await result_of(await serve(Reporting()))
    assert (result.failure.kind, result.failure.message) == ("verifier_error", "no tests found")
    assert (result.status, result.critical_error) == (JobStatus.FAILED, "eval")


async def test_eval_exception_may_still_give_a_verdict(serve):
    class Falling(Quick):
        async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
            raise EvaluationError("first grader died")

        def eval_exception(self, job: Job, error: Exception) -> EvalOutput:
            return EvalOutput(0.5)

    result = await result_of(await serve(Falling()))
    assert (result.status, result.reward, result.mask_sample) == (JobStatus.FAILED, 0.5, False)


async def test_a_callback_that_breaks_too_is_a_warning(serve):
    class Twice(Quick):
        async def init(self, job: Job) -> Prepared:
            raise RuntimeStartError("no image")

        async def init_exception(self, job: Job, error: Exception) -> None:
            raise ValueError("and this")

    result = await result_of(await serve(Twice()))
    assert result.failure.message == "no image"
    assert result.warnings == ["init_exception failed: ValueError: and this"]


async def test_what_a_failed_init_had_started_is_stopped_and_others_never_notice(serve):
    live = Live()

    class EveryThird(Quick):
        async def init(self, job: Job) -> Prepared:
            runtime = Sandbox(live)
            job.adopt(runtime)
            await asyncio.sleep(0)
            if int(job.id) % 3 == 0:
                raise RuntimeStartError("no image")
            return Prepared(runtime)

    pipeline = await serve(EveryThird())
    tickets = [pipeline.submit(request_of(job_id=str(number))) for number in range(30)]
    statuses = [(await ended(ticket)).status for ticket in tickets]
    assert statuses.count(JobStatus.FAILED) == 10
    assert statuses.count(JobStatus.COMPLETED) == 20
    await until(lambda: idle(pipeline))
    assert live.now == 0


async def test_a_sandbox_that_cannot_be_stopped_is_shown_and_tried_again_and_the_result_kept(serve, monkeypatch):
    """L-18."""
    monkeypatch.setattr("prorl_gym.pipeline.leftovers.RETRY_S", 0.05)
    freed = asyncio.Event()

    class Stuck:
        attempts = 0

        async def stop(self) -> None:
            self.attempts += 1
            if not freed.is_set():
                raise SandboxError("device busy")

    stuck = Stuck()

    class Holding(Quick):
        async def init(self, job: Job) -> Prepared:
            return Prepared(stuck)

    pipeline = await serve(Holding())
    result = await result_of(pipeline, job_id="j")
    assert (result.status, result.reward) == (JobStatus.COMPLETED, 1.0)
    [leftover] = pipeline.snapshot().leftovers
    assert (leftover["kind"], leftover["job_id"], leftover["what"]) == ("resource", "j", "stop of Stuck")
    await until(lambda: stuck.attempts >= 3)
    freed.set()
    await until(lambda: pipeline.snapshot().leftovers == [])


async def test_a_stop_that_does_not_return_holds_nothing_up(serve, monkeypatch):
    monkeypatch.setattr("prorl_gym.pipeline.scope.TEARDOWN_S", 0.1)
    release = asyncio.Event()

    class Endless:
        async def stop(self) -> None:
            await release.wait()

    class Holding(Quick):
        async def init(self, job: Job) -> Prepared:
            return Prepared(Endless())

    pipeline = await serve(Holding(), pools=(1, 1, 1))
    assert (await result_of(pipeline)).status is JobStatus.COMPLETED
    assert (await result_of(pipeline)).status is JobStatus.COMPLETED
    assert len(pipeline.snapshot().leftovers) == 2
    release.set()
    await until(lambda: pipeline.snapshot().leftovers == [])


@pytest.mark.parametrize(
    ("errors", "kind", "says"),
    [
        ([SandboxError("gone")], "sandbox", "gone"),
        ([SandboxError("gone"), ValueError("x")], "handler", "ExceptionGroup"),
    ],
)
async def test_a_failure_inside_a_task_group_keeps_its_name_when_it_is_the_only_one(serve, errors, kind, says):
    async def fail(error: Exception) -> None:
        raise error

    class Grouped(Quick):
        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            async with asyncio.TaskGroup() as group:
                for error in errors:
                    group.create_task(fail(error))
            raise AssertionError

    result = await result_of(await serve(Grouped()))
    assert result.failure.kind == kind
    assert says in result.failure.message
