"""What is taken in, what is refused, and what an id means."""

import asyncio

import pytest

from prorl_gym.errors import DuplicateJob, JobNotFound, NotRunning, QueueFull, RequestError, UnknownTask
from prorl_gym.types import JobRequest, JobStatus

from .kit import Quick, Staged, ended, idle, request_of, until


async def test_an_unknown_task_is_refused_and_the_known_ones_listed(serve):
    pipeline = await serve(Quick())
    with pytest.raises(UnknownTask, match="known: t"):
        pipeline.submit(request_of("nothing"))
    assert pipeline.snapshot().total == 0


async def test_a_handler_may_refuse_a_request_and_may_not_break_the_server(serve):
    class Picky(Quick):
        def check(self, request: JobRequest) -> None:
            if "answer" not in request.instance:
                raise RequestError("a row needs an answer", field="instance.answer")
            raise KeyError("oops")

    pipeline = await serve(Picky())
    with pytest.raises(RequestError, match="needs an answer") as refused:
        pipeline.submit(request_of())
    assert refused.value.field == "instance.answer"
    with pytest.raises(RequestError, match="cannot take this request: KeyError"):
        pipeline.submit(request_of(instance={"answer": 1}))
    assert pipeline.snapshot().total == 0


async def test_a_full_queue_says_when_to_come_again_and_what_runs_does_not_count(serve):
    handler = Staged("init")
    pipeline = await serve(handler, pools=(2, 1, 1), ready_ahead=2, max_queued=3)
    running = [pipeline.submit(request_of()) for _ in range(2)]
    await until(lambda: pipeline.snapshot().active_init == 2)
    waiting = [pipeline.submit(request_of()) for _ in range(3)]
    await until(lambda: pipeline.snapshot().init_queue == 3)
    with pytest.raises(QueueFull, match="3 jobs wait") as full:
        pipeline.submit(request_of())
    assert 1 <= full.value.retry_after_s <= 60
    handler.go["init"].set()
    for ticket in running + waiting:
        await ended(ticket)
    await ended(pipeline.submit(request_of()))


async def test_a_burst_cannot_slip_past_a_full_queue(serve):
    pipeline = await serve(Staged("init"), pools=(1, 1, 1), max_queued=5)
    refused = 0
    for _ in range(20):
        try:
            pipeline.submit(request_of())
        except QueueFull:
            refused += 1
    assert refused == 15


async def test_the_same_id_joins_the_running_job_and_then_returns_its_result(serve):
    handler = Staged("run")
    pipeline = await serve(handler)
    first = pipeline.submit(request_of(job_id="j", priority=1))
    await handler.inside["run"].wait()
    assert pipeline.submit(request_of(job_id="j", priority=1)) is first
    handler.go["run"].set()
    outcome = await ended(first)
    assert (await ended(pipeline.submit(request_of(job_id="j", priority=1)))) is outcome
    assert pipeline.snapshot().total == 1


async def test_a_cancelled_id_stays_cancelled(serve):
    pipeline = await serve(Staged("run"))
    pipeline.submit(request_of(job_id="j"))
    pipeline.cancel(job_ids=["j"])
    assert (await ended(pipeline.submit(request_of(job_id="j")))).status is JobStatus.CANCELLED


async def test_equal_after_parsing_is_the_same_body(serve):
    pipeline = await serve(Quick())
    first = pipeline.submit(request_of(job_id="j", sampling_params={"max_output_tokens": 5}))
    assert pipeline.submit(request_of(job_id="j", sampling_params={"max_tokens": 5})) is first


@pytest.mark.parametrize("other", [{"instance": {"x": 1}}, {"priority": 2}, {"sampling_params": {"seed": 1}}])
async def test_the_same_id_with_another_body_is_refused(serve, other):
    pipeline = await serve(Quick())
    await ended(pipeline.submit(request_of(job_id="j")))
    with pytest.raises(DuplicateJob):
        pipeline.submit(request_of(job_id="j", **other))


async def test_results_go_by_count_the_oldest_first_and_jobs_under_way_never(serve):
    handler = Staged("run")
    pipeline = await serve(handlers={"held": handler, "t": Quick()}, results={"max_count": 2})
    held = pipeline.submit(request_of("held", job_id="held"))
    for name in "abc":
        await ended(pipeline.submit(request_of(job_id=name, group_id="g")))
    with pytest.raises(JobNotFound):
        pipeline.get("a")
    assert pipeline.get("b").outcome is not None
    assert sorted(pipeline.cancel(group_id="g").already_ended) == ["b", "c"]
    assert pipeline.get("held") is held
    handler.go["run"].set()
    await ended(held)


async def test_results_go_by_age(serve):
    pipeline = await serve(Quick(), results={"ttl_s": 0.05})
    await ended(pipeline.submit(request_of(job_id="j")))
    pipeline.get("j")

    def gone() -> bool:
        try:
            pipeline.get("j")
        except JobNotFound:
            return True
        return False

    await until(gone)
    again = pipeline.submit(request_of(job_id="j", priority=3))
    assert (await ended(again)).status is JobStatus.COMPLETED


async def test_nothing_is_taken_in_before_the_start_but_results_stay_fetchable_after_a_stop(serve):
    pipeline = await serve(Quick())
    await ended(pipeline.submit(request_of(job_id="j")))
    await pipeline.stop()
    with pytest.raises(NotRunning, match="stopped"):
        pipeline.submit(request_of())
    assert pipeline.submit(request_of(job_id="j")).outcome is pipeline.get("j").outcome
    await pipeline.start()
    assert (await ended(pipeline.submit(request_of()))).status is JobStatus.COMPLETED


async def test_the_snapshot_counts_every_job_by_state(serve):
    handler = Staged("run")
    pipeline = await serve(handler, pools=(1, 2, 1), ready_ahead=1)
    tickets = [pipeline.submit(request_of(job_id=str(number))) for number in range(6)]
    await until(lambda: pipeline.snapshot().run_queue == 1)
    now = pipeline.snapshot()
    assert {state: count for state, count in now.jobs.items() if count} == {"queued": 3, "init": 1, "run": 2}
    assert (now.total, now.init_queue, now.run_queue, now.active_init, now.active_run) == (6, 3, 1, 0, 2)
    assert now.pools["ready_ahead"] == {"limit": 1, "taken": 1}
    pipeline.cancel(job_ids=["5"])
    handler.go["run"].set()
    await asyncio.gather(*(ended(ticket) for ticket in tickets))
    assert {state: count for state, count in pipeline.snapshot().jobs.items() if count} == {
        "completed": 5,
        "cancelled": 1,
    }
    assert idle(pipeline)
