"""Handlers that block, never yield or ignore their cancel cost what they must and nothing more."""

import asyncio
import logging
import threading
import time

import pytest

from prorl_gym.handlers.base import AgentHandler, EvalOutput, Job, Prepared, RunOutput
from prorl_gym.types import JobStatus, StopReason

from .kit import Live, Quick, Sandbox, context_of, ended, idle, record_turn, request_of, until


class Blocking(AgentHandler):
    """Plain `def` methods, all of them blocking."""

    def __init__(self) -> None:
        super().__init__(context_of())
        self.inside = threading.Event()
        self.go = threading.Event()
        self.threads: set[int] = set()

    def init(self, job: Job) -> Prepared:
        time.sleep(0.01)
        return Prepared(metadata=threading.get_ident())

    def run(self, job: Job, prepared: Prepared) -> RunOutput:
        self.threads.add(threading.get_ident())
        record_turn(job)
        job.emit("from a thread")
        job.warn("from a thread")
        self.inside.set()
        self.go.wait(30)
        return RunOutput(StopReason.ANSWERED)

    def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
        time.sleep(0.01)
        return EvalOutput(1.0)


@pytest.fixture
def blocking():
    handler = Blocking()
    yield handler
    handler.go.set()


async def test_blocking_methods_run_in_threads_and_leave_the_loop_alone(serve, blocking):
    pipeline = await serve(blocking, pools=(8, 8, 8))
    tickets = [pipeline.submit(request_of()) for _ in range(8)]
    await until(lambda: len(blocking.threads) == 8)
    assert threading.get_ident() not in blocking.threads
    begun = time.monotonic()
    await asyncio.sleep(0.01)
    assert time.monotonic() - begun < 0.2
    blocking.go.set()
    for ticket in tickets:
        outcome = await ended(ticket)
        assert (outcome.status, outcome.warnings) == (JobStatus.COMPLETED, ("from a thread",))
        assert "from a thread" in [event.name for event in ticket.events.since()]
    assert 8 <= pipeline.snapshot().pools["handler_threads"] <= 24


async def test_threads_are_kept_for_the_next_call_and_end_with_the_pipeline(serve, blocking):
    blocking.go.set()
    pipeline = await serve(blocking, pools=(1, 1, 1))
    for _ in range(5):
        await ended(pipeline.submit(request_of()))
    assert pipeline.snapshot().pools["handler_threads"] <= 3
    await pipeline.stop()
    await until(lambda: not [each for each in threading.enumerate() if each.name == "prorl-handler"])


async def test_a_thread_that_outlives_its_cancel_is_listed_and_its_slot_freed(serve, blocking):
    pipeline = await serve(blocking, pools=(1, 1, 1))
    ticket = pipeline.submit(request_of(job_id="j"))
    await until(blocking.inside.is_set)
    begun = time.monotonic()
    pipeline.cancel(job_ids=["j"])
    outcome = await ended(ticket)
    assert (outcome.status, len(outcome.result()["messages"])) == (JobStatus.CANCELLED, 2)
    assert time.monotonic() - begun < 0.1
    await until(lambda: idle(pipeline))
    [leftover] = pipeline.snapshot().leftovers
    assert (leftover["kind"], leftover["what"]) == ("handler", "t.run of job j")
    blocking.inside.clear()
    following = pipeline.submit(request_of())
    await until(blocking.inside.is_set)
    blocking.go.set()
    assert (await ended(following)).status is JobStatus.COMPLETED
    await until(lambda: pipeline.snapshot().leftovers == [])


async def test_a_thread_over_its_budget_times_out(serve, blocking):
    pipeline = await serve(blocking)
    outcome = await ended(pipeline.submit(request_of(timeout_s=0.1)))
    assert (outcome.status, outcome.failure.kind) == (JobStatus.TIMEOUT, "timeout")


async def test_what_a_thread_raises_is_its_jobs_failure(serve, blocking):
    def fail(*_: object) -> None:
        raise StopIteration("odd")

    blocking.run = fail
    outcome = await ended((await serve(blocking)).submit(request_of()))
    assert (outcome.status, outcome.failure.kind) == (JobStatus.FAILED, "handler")
    assert "StopIteration: odd" in outcome.failure.message


async def test_a_plain_method_may_return_an_awaitable(serve):
    class Wrapped(Quick):
        def run(self, job: Job, prepared: Prepared):  # type: ignore[override]
            return super().run(job, prepared)

    assert (await ended((await serve(Wrapped())).submit(request_of()))).status is JobStatus.COMPLETED


class Deaf(Quick):
    """Swallows every cancel."""

    def __init__(self, live: Live | None = None) -> None:
        super().__init__()
        self.live = live or Live()
        self.inside, self.go = asyncio.Event(), asyncio.Event()

    async def init(self, job: Job) -> Prepared:
        return Prepared(Sandbox(self.live))

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        self.inside.set()
        while not self.go.is_set():
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                pass
        job.adopt(Sandbox(self.live))
        return await super().run(job, prepared)


@pytest.mark.parametrize("end", ["cancel", "timeout"])
async def test_a_handler_that_swallows_its_cancel_is_abandoned_after_the_grace(serve, end):
    deaf = Deaf()
    pipeline = await serve(deaf, pools=(1, 1, 1), cancel_grace_s=0.1)
    ticket = pipeline.submit(request_of(job_id="j", timeout_s=60 if end == "cancel" else 0.1))
    await deaf.inside.wait()
    begun = time.monotonic()
    if end == "cancel":
        pipeline.cancel(job_ids=["j"])
        assert ticket.outcome is not None
    assert (await ended(ticket)).status == ("cancelled" if end == "cancel" else "timeout")
    await until(lambda: idle(pipeline))
    assert 0.1 <= time.monotonic() - begun < 1.5
    assert [leftover["job_id"] for leftover in pipeline.snapshot().leftovers] == ["j"]
    assert deaf.live.now == 0, "its sandbox is stopped all the same"

    deaf.go.set()
    await until(lambda: pipeline.snapshot().leftovers == [])
    assert (deaf.live.most, deaf.live.now) == (1, 0), "also the one that it starts after everybody left"
    assert (await ended(pipeline.submit(request_of()))).status is JobStatus.COMPLETED


async def test_a_handler_that_never_yields_is_named_in_the_log(serve, caplog):
    class Hogging(Quick):
        async def run(self, job: Job, prepared: Prepared) -> RunOutput:
            time.sleep(0.5)
            return await super().run(job, prepared)

    pipeline = await serve(Hogging(), blocked_loop_warning_s=0.1)
    with caplog.at_level(logging.WARNING):
        assert (await ended(pipeline.submit(request_of(job_id="hog")))).status is JobStatus.COMPLETED
    [record] = [record for record in caplog.records if "held the event loop" in record.message]
    assert record.blocked_by == "t.run of job hog"
    assert "time.sleep(0.5)" in record.message


async def test_a_loop_that_is_merely_busy_is_not_blamed(serve, caplog):
    pipeline = await serve(Quick(), blocked_loop_warning_s=0.2, pools=(64, 64, 64))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            for ticket in [pipeline.submit(request_of()) for _ in range(50)]:
                await ended(ticket)
    assert not [record for record in caplog.records if "held the event loop" in record.message]
