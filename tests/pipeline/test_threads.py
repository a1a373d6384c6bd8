"""Threads for plain `def` handlers: bounded, kept, and never waited for in vain."""

import asyncio
import contextvars
import threading

import pytest

from prorl_gym.pipeline.threads import HandlerThreads

from .kit import until

mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="none")


async def test_calls_beyond_the_limit_wait_and_one_that_waits_can_be_cancelled_at_once():
    threads, go, ran = HandlerThreads(lambda: 1), threading.Event(), []
    first = asyncio.create_task(threads.call(go.wait, 30))
    second = asyncio.create_task(threads.call(ran.append, 2))
    third = asyncio.create_task(threads.call(ran.append, 3))
    await until(lambda: threads.count == 1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(second, 1)
    assert ran == []
    go.set()
    assert await first is True
    await third
    assert (ran, threads.count) == ([3], 1)
    threads.close()


async def test_a_running_call_delivers_its_cancel_when_it_has_returned():
    threads, inside, go = HandlerThreads(lambda: 1), threading.Event(), threading.Event()

    def block() -> None:
        inside.set()
        go.wait(30)

    call = asyncio.create_task(threads.call(block))
    await until(inside.is_set)
    call.cancel()
    await asyncio.sleep(0)
    assert not call.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    threads.close()


async def test_the_callers_context_goes_along():
    threads = HandlerThreads(lambda: 1)
    mark.set("job 7")
    assert await threads.call(mark.get) == "job 7"
    threads.close()
    threads.reopen()
    assert await threads.call(mark.get) == "job 7"
    threads.close()
