"""Stopping: bounded, with every waiter answered, and it can start again."""

import asyncio
import time

import pytest

from prorl_gym.errors import NotRunning
from prorl_gym.types import JobStatus

from .kit import Quick, Staged, ended, idle, request_of, until
from .test_misbehaviour import Deaf


async def test_stop_cancels_what_runs_and_what_waits_and_answers_everybody(serve):
    """L-02, the pipeline's part."""
    handler = Staged("run")
    pipeline = await serve(handler, pools=(2, 2, 2))
    tickets = [pipeline.submit(request_of()) for _ in range(10)]
    waiters = [asyncio.create_task(ticket.wait()) for ticket in tickets]
    await handler.inside["run"].wait()
    await asyncio.wait_for(pipeline.stop(), 5)
    outcomes = await asyncio.gather(*waiters)
    assert {outcome.status for outcome in outcomes} == {JobStatus.CANCELLED}
    assert outcomes[0].failure.message == "the service is stopping"
    assert pipeline.state == "stopped"
    assert idle(pipeline)


async def test_drain_refuses_the_new_and_lets_the_old_end(serve):
    handler = Staged("run")
    pipeline = await serve(handler, pools=(1, 1, 1))
    tickets = [pipeline.submit(request_of()) for _ in range(3)]
    await handler.inside["run"].wait()
    stopping = asyncio.create_task(pipeline.stop(drain=True))
    await until(lambda: pipeline.state == "stopping")
    with pytest.raises(NotRunning, match="stopping"):
        pipeline.submit(request_of())
    handler.go["run"].set()
    await asyncio.wait_for(stopping, 5)
    assert {ticket.outcome.status for ticket in tickets} == {JobStatus.COMPLETED}


async def test_a_drain_ends_at_its_deadline(serve):
    pipeline = await serve(Staged("run"))
    ticket = pipeline.submit(request_of())
    begun = time.monotonic()
    await asyncio.wait_for(pipeline.stop(drain=True, deadline_s=0.1), 5)
    assert time.monotonic() - begun >= 0.1
    assert ticket.outcome.status is JobStatus.CANCELLED


async def test_a_stop_without_drain_cuts_a_drain_short(serve):
    pipeline = await serve(Staged("run"))
    ticket = pipeline.submit(request_of())
    draining = asyncio.create_task(pipeline.stop(drain=True))
    await until(lambda: pipeline.state == "stopping")
    await asyncio.wait_for(pipeline.stop(), 5)
    await asyncio.wait_for(draining, 5)
    assert ticket.outcome.status is JobStatus.CANCELLED


async def test_a_handler_that_ignores_its_cancel_does_not_hold_the_stop_up(serve):
    deaf = Deaf()
    pipeline = await serve(deaf, cancel_grace_s=0.1)
    ticket = pipeline.submit(request_of())
    await deaf.inside.wait()
    begun = time.monotonic()
    await pipeline.stop()
    assert time.monotonic() - begun < 2
    assert ticket.outcome.status is JobStatus.CANCELLED
    assert len(pipeline.snapshot().leftovers) == 1
    deaf.go.set()
    await until(lambda: not pipeline.snapshot().leftovers)


async def test_start_and_stop_are_idempotent_and_it_starts_again(serve):
    pipeline = await serve(Quick())
    await pipeline.start()
    for _ in range(3):
        assert (await ended(pipeline.submit(request_of()))).status is JobStatus.COMPLETED
        await asyncio.gather(pipeline.stop(), pipeline.stop(drain=True))
        await pipeline.stop()
        await pipeline.start()
        assert pipeline.state == "running"
    assert pipeline.snapshot().total == 3


async def test_start_during_a_stop_waits_for_it(serve):
    handler = Staged("run")
    pipeline = await serve(handler)
    pipeline.submit(request_of())
    stopping = asyncio.create_task(pipeline.stop())
    await asyncio.sleep(0)
    assert pipeline.state == "stopping"
    await pipeline.start()
    assert pipeline.state == "running"
    await stopping
    handler.go["run"].set()
    assert (await ended(pipeline.submit(request_of()))).status is JobStatus.COMPLETED
