"""Cancel: from any moment, it wins, and it is answered at once."""

import asyncio
import time

import pytest

from prorl_gym.errors import RequestError
from prorl_gym.handlers.base import EvalOutput, Job, Prepared, RunOutput
from prorl_gym.pipeline.leftovers import Leftovers
from prorl_gym.pipeline.scope import ResourceScope
from prorl_gym.types import JobResult, JobStatus, StopReason

from .kit import Live, Quick, Sandbox, Staged, ended, idle, record_turn, request_of, until


def check_cancelled(result: JobResult) -> None:
    assert (result.status, result.stop_reason) == (JobStatus.CANCELLED, StopReason.CANCELLED)
    assert (result.reward, result.mask_sample, result.filter, result.success) == (None, True, True, False)
    assert result.critical_error == "cancelled"
    assert result.failure is not None and result.failure.kind == "cancelled"


async def test_right_after_submit_no_handler_code_runs(serve):
    handler = Staged()
    pipeline = await serve(handler)
    ticket = pipeline.submit(request_of(job_id="j"))
    report = pipeline.cancel(job_ids=["j"])
    assert report.cancelled == ["j"]
    check_cancelled(JobResult.model_validate(ticket.outcome.result()))
    await until(lambda: idle(pipeline))
    assert not handler.inside["init"].is_set()


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
async def test_in_the_middle_of_a_stage(serve, stage):
    handler = Staged(stage)
    pipeline = await serve(handler)
    ticket = pipeline.submit(request_of(job_id="j"))
    waiter = asyncio.create_task(ticket.wait())
    await handler.inside[stage].wait()
    assert pipeline.cancel(job_ids=["j"]).cancelled == ["j"]
    result = JobResult.model_validate((await waiter).result())
    check_cancelled(result)
    assert result.failure.stage == stage
    assert len(result.messages) == (0 if stage == "init" else 2)
    assert pipeline.cancel(job_ids=["j"]).already_ended == ["j"]
    await until(lambda: idle(pipeline))
    assert handler.ended[-1] == stage
    assert ticket.outcome is await ended(ticket)


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
async def test_while_waiting_for_a_stage(serve, stage):
    pools = {"init": (1, 4, 4), "run": (4, 1, 4), "eval": (4, 4, 1)}[stage]
    handler = Staged(stage)
    pipeline = await serve(handler, pools=pools)
    blocker = pipeline.submit(request_of())
    await handler.inside[stage].wait()
    ticket = pipeline.submit(request_of(job_id="j"))
    await until(lambda: getattr(pipeline.snapshot(), f"{stage}_queue") == 1)
    pipeline.cancel(job_ids=["j"])
    check_cancelled(JobResult.model_validate(ticket.outcome.result()))
    handler.go[stage].set()
    assert (await ended(blocker)).status is JobStatus.COMPLETED
    await until(lambda: idle(pipeline))


async def test_after_the_end_it_changes_nothing(serve):
    pipeline = await serve(Quick())
    ticket = pipeline.submit(request_of(job_id="j"))
    await ended(ticket)
    report = pipeline.cancel(job_ids=["j", "nobody"])
    assert (report.cancelled, report.already_ended, report.not_found) == ([], ["j"], ["nobody"])
    assert ticket.outcome.status is JobStatus.COMPLETED


async def test_it_wins_against_a_stage_that_ends_in_the_same_moment(serve):
    handler = Staged("eval")
    pipeline = await serve(handler)
    ticket = pipeline.submit(request_of(job_id="j"))
    await handler.inside["eval"].wait()
    handler.go["eval"].set()
    pipeline.cancel(job_ids=["j"])
    await until(lambda: idle(pipeline))
    check_cancelled(JobResult.model_validate(ticket.outcome.result()))
    assert pipeline.snapshot().jobs["cancelled"] == 1


async def test_the_answer_does_not_wait_for_the_sandbox_to_stop_but_the_slot_does(serve):
    live = Live()

    class SlowToStop(Staged):
        async def init(self, job: Job) -> Prepared:
            return Prepared(Sandbox(live, stop_s=0.2))

    handler = SlowToStop("run")
    pipeline = await serve(handler)
    ticket = pipeline.submit(request_of(job_id="j"))
    await handler.inside["run"].wait()
    begun = time.monotonic()
    pipeline.cancel(job_ids=["j"])
    await ended(ticket)
    assert time.monotonic() - begun < 0.1
    await asyncio.sleep(0.05)
    assert (live.now, pipeline.snapshot().active_run) == (1, 1)
    await until(lambda: idle(pipeline))
    assert live.now == 0


async def test_while_the_sandbox_of_a_failed_init_stops_it_keeps_no_place(serve):
    live, stopping, let_stop = Live(), asyncio.Event(), asyncio.Event()

    class Held(Sandbox):
        async def stop(self) -> None:
            stopping.set()
            await let_stop.wait()
            await super().stop()

    class Fails(Quick):
        async def init(self, job: Job) -> Prepared:
            if job.id == "j":
                job.adopt(Held(live))
                raise ValueError("no sandbox today")
            return Prepared()

    pipeline = await serve(Fails(), ready_ahead=1)
    ticket = pipeline.submit(request_of(job_id="j"))
    await stopping.wait()
    assert pipeline.cancel(job_ids=["j"]).cancelled == ["j"]
    check_cancelled(JobResult.model_validate((await ended(ticket)).result()))
    let_stop.set()
    await until(lambda: idle(pipeline))
    assert live.now == 0
    assert (await ended(pipeline.submit(request_of(job_id="next")))).status is JobStatus.COMPLETED


async def test_what_is_adopted_after_a_teardown_that_a_cancel_met_is_stopped_too():
    live, leftovers, stopping, let_stop = Live(), Leftovers(), asyncio.Event(), asyncio.Event()

    class Held(Sandbox):
        async def stop(self) -> None:
            stopping.set()
            await let_stop.wait()
            await super().stop()

    scope = ResourceScope("j", leftovers, asyncio.get_running_loop())
    scope.adopt(Held(live))
    closing = asyncio.create_task(scope.close())
    await stopping.wait()
    closing.cancel()
    let_stop.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    scope.adopt(Sandbox(live))
    await until(lambda: live.now == 0 and len(leftovers) == 0)


async def test_a_sandbox_that_is_just_starting_is_stopped(serve):
    live, starting = Live(), asyncio.Event()

    class Starting(Quick):
        async def init(self, job: Job) -> Prepared:
            runtime = Sandbox(live)
            job.adopt(runtime)
            starting.set()
            await asyncio.sleep(60)
            return Prepared(runtime)

    pipeline = await serve(Starting())
    pipeline.submit(request_of(job_id="j"))
    await starting.wait()
    pipeline.cancel(job_ids=["j"])
    await until(lambda: idle(pipeline))
    assert live.now == 0


async def test_a_runtime_that_init_returns_in_spite_of_its_cancel_is_stopped(serve):
    live, inside = Live(), asyncio.Event()

    class Stubborn(Quick):
        async def init(self, job: Job) -> Prepared:
            inside.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(0.05)
            return Prepared(Sandbox(live))

    pipeline = await serve(Stubborn())
    pipeline.submit(request_of(job_id="j"))
    await inside.wait()
    pipeline.cancel(job_ids=["j"])
    await until(lambda: idle(pipeline))
    assert (live.most, live.now) == (1, 0)


async def test_by_prefix_and_group_and_ids_together(serve):
    handler = Staged("run")
    pipeline = await serve(handler, pools=(9, 9, 9))
    for name, group in [("a-1", "g"), ("a-2", None), ("b-1", "g"), ("c-1", None)]:
        pipeline.submit(request_of(job_id=name, group_id=group))
    report = pipeline.cancel(job_ids=["c-1", "none"], prefix="a-", group_id="g")
    assert sorted(report.cancelled) == ["a-1", "a-2", "b-1", "c-1"]
    assert report.not_found == ["none"]
    with pytest.raises(RequestError, match="at least one"):
        pipeline.cancel()
    await until(lambda: idle(pipeline))


async def test_a_waiter_who_leaves_does_not_take_the_job_along(serve):
    handler = Staged("run")
    pipeline = await serve(handler)
    ticket = pipeline.submit(request_of())
    waiter = asyncio.create_task(ticket.wait())
    await handler.inside["run"].wait()
    waiter.cancel()
    assert await ticket.wait(0.01) is None
    handler.go["run"].set()
    assert (await ended(ticket)).status is JobStatus.COMPLETED


@pytest.mark.parametrize("where", ["call", "retry", "thread", "callback", "waiting"])
async def test_no_further_step_is_taken_wherever_the_cancel_meets_the_handler(serve, where):
    """L-07, the pipeline's part: cancelled within the bound, and the loop does not run on."""
    inside, steps = asyncio.Event(), []

    class Looping(Quick):
        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            record_turn(job)
            if where == "callback":
                raise ValueError("first this")
            while True:
                steps.append(1)
                inside.set()
                if where == "waiting":
                    async with job.waiting("a person"):
                        await asyncio.sleep(60)
                elif where == "thread":
                    await asyncio.to_thread(time.sleep, 0.1)
                    await asyncio.sleep(60)
                elif where == "retry":
                    try:
                        raise ConnectionError
                    except ConnectionError:
                        await asyncio.sleep(60)
                else:
                    await asyncio.sleep(60)

        async def run_exception(self, job: Job, error: Exception) -> RunOutput | None:
            inside.set()
            await asyncio.sleep(60)
            return None

        async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
            steps.append(2)
            return EvalOutput(1.0)

    pipeline = await serve(Looping())
    ticket = pipeline.submit(request_of(job_id="j"))
    await inside.wait()
    before = len(steps)
    pipeline.cancel(job_ids=["j"])
    await until(lambda: idle(pipeline), 2)
    assert len(steps) == before
    assert len((await ended(ticket)).result()["messages"]) == 2
