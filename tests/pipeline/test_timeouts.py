"""Budgets: what runs over is cut, what was recorded stays, and waiting is free."""

import asyncio

import pytest

from prorl_gym.handlers.base import EvalOutput, Job, Prepared, RunOutput
from prorl_gym.types import JobResult, JobStatus, StopReason

from .kit import Live, Quick, Sandbox, Staged, ended, idle, request_of, until


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"timeout_s": 0.05}, "run ran over the job's budget of 0.05 s"),
        ({"stage_timeouts_s": {"run": 0.05}}, "run ran over its budget of 0.05 s"),
    ],
)
async def test_a_run_over_its_budget_keeps_its_trajectory_and_is_not_scored(serve, fields, says):
    handler = Staged("run")
    pipeline = await serve(handler)
    result = JobResult.model_validate((await ended(pipeline.submit(request_of(**fields)))).result())
    assert (result.status, result.stop_reason, result.critical_error) == (
        JobStatus.TIMEOUT,
        StopReason.TIMEOUT,
        "timeout",
    )
    assert (result.reward, result.mask_sample, result.filter) == (None, True, True)
    assert (result.failure.stage, result.failure.kind, result.failure.message) == ("run", "timeout", says)
    assert result.segments[0].response_ids == [7, 8]
    assert result.timing.timeout_triggered
    assert 0.05 <= result.timing.counted_elapsed < 1
    assert not handler.inside["eval"].is_set()
    await until(lambda: idle(pipeline))


async def test_on_run_timeout_evaluate_scores_it_with_a_fresh_budget(serve):
    live, seen = Live(), []

    class Patching(Staged):
        async def init(self, job: Job) -> Prepared:
            return Prepared(Sandbox(live))

        async def run_exception(self, job: Job, error: Exception) -> RunOutput:
            assert live.now == 1, "the sandbox is still there to take the patch out of"
            return RunOutput(StopReason.TIMEOUT, git_patch="so far", error=error)

        async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
            seen.append(run_output.git_patch)
            await asyncio.sleep(0.02)
            return EvalOutput(0.5)

    pipeline = await serve(Patching("run"), on_run_timeout="evaluate")
    result = (await ended(pipeline.submit(request_of(timeout_s=0.1)))).result()
    assert (result["status"], result["reward"], result["mask_sample"]) == ("timeout", 0.5, False)
    assert (result["stop_reason"], result["git_patch"], seen) == ("timeout", "so far", ["so far"])


@pytest.mark.parametrize("stage", ["init", "eval"])
async def test_init_and_eval_over_their_budget_are_no_measurement(serve, stage):
    handler = Staged(stage)
    pipeline = await serve(handler)
    ticket = pipeline.submit(request_of(stage_timeouts_s={stage: 0.05}))
    result = JobResult.model_validate((await ended(ticket)).result())
    assert (result.status, result.failure.stage, result.reward, result.mask_sample) == (
        JobStatus.TIMEOUT,
        stage,
        None,
        True,
    )
    assert handler.ended[-1] == stage
    await until(lambda: idle(pipeline))


async def test_waiting_for_a_person_is_free_and_shows_in_the_events(serve):
    class Asking(Quick):
        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            async with job.waiting("a person"):
                await asyncio.sleep(0.3)
            return await super().run(job, prepared)

    ticket = (await serve(Asking())).submit(request_of(timeout_s=0.15))
    outcome = await ended(ticket)
    assert outcome.status is JobStatus.COMPLETED
    assert outcome.timing.run_time >= 0.3
    assert outcome.timing.active["run"] < 0.15
    assert [(event.name, event.fields.get("reason")) for event in ticket.events.since(3)][:2] == [
        ("waiting", "a person"),
        ("resumed", "a person"),
    ]


async def test_a_cancel_ends_a_wait_for_a_person(serve):
    asked = asyncio.Event()

    class Asking(Quick):
        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            async with job.waiting("a person"):
                asked.set()
                await asyncio.sleep(600)
            raise AssertionError

    pipeline = await serve(Asking())
    pipeline.submit(request_of(job_id="j"))
    await asked.wait()
    pipeline.cancel(job_ids=["j"])
    await until(lambda: idle(pipeline))


async def test_a_cancel_during_the_end_of_a_timeout_wins(serve):
    cut = asyncio.Event()

    class SlowToEnd(Quick):
        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            try:
                await asyncio.sleep(600)
            finally:
                cut.set()
                await asyncio.sleep(0.1)
            raise AssertionError

    pipeline = await serve(SlowToEnd())
    ticket = pipeline.submit(request_of(job_id="j", timeout_s=0.05))
    await cut.wait()
    pipeline.cancel(job_ids=["j"])
    assert ticket.outcome.status is JobStatus.CANCELLED
    await until(lambda: idle(pipeline))
