"""Budgets count execution and nothing else."""

import asyncio

import pytest

from prorl_gym.pipeline.timer import PausableTimer, Pause


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def nothing(*_: object) -> None:
    pass


async def test_only_the_time_inside_stages_counts(clock: Clock):
    timer = PausableTimer(60, clock=clock)
    clock.now += 1000
    timer.enter("init", None, nothing)
    clock.now += 2
    timer.leave()
    clock.now += 1000
    timer.enter("run", None, nothing)
    clock.now += 3
    assert timer.elapsed_s == 5
    assert timer.active() == {"init": 2, "run": 3}
    assert timer.remaining_s == 55
    timer.leave()


async def test_a_stage_has_its_own_budget_within_the_jobs(clock: Clock):
    timer = PausableTimer(10, clock=clock)
    timer.enter("init", 4, nothing)
    clock.now += 1
    assert timer.remaining_s == 3
    timer.leave()
    timer.enter("run", 100, nothing)
    clock.now += 2
    assert timer.remaining_s == 7
    timer.leave()


async def test_pauses_nest_and_the_last_one_to_end_lets_the_timer_run(clock: Clock):
    changes: list[str] = []
    timer = PausableTimer(60, clock=clock)
    timer.enter("run", None, nothing)
    async with Pause(timer, changes.append):
        clock.now += 10
        async with Pause(timer, changes.append):
            clock.now += 10
        clock.now += 10
    clock.now += 1
    assert timer.elapsed_s == 1
    assert changes == ["waiting", "waiting", "resumed", "resumed"]
    timer.leave()


async def test_a_pause_left_open_by_one_stage_does_not_touch_the_next(clock: Clock):
    timer = PausableTimer(60, clock=clock)
    timer.enter("run", None, nothing)
    entry = timer.pause()
    timer.leave()
    timer.enter("eval", None, nothing)
    clock.now += 2
    timer.resume(entry)
    clock.now += 2
    assert timer.active() == {"run": 0, "eval": 4}
    timer.leave()


async def test_it_rings_once_when_the_budget_is_used_up_and_not_while_paused():
    rung = asyncio.Event()
    timer = PausableTimer(0.05)
    timer.enter("run", None, rung.set)
    async with Pause(timer, nothing):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rung.wait(), 0.2)
    assert not timer.expired
    await asyncio.wait_for(rung.wait(), 5)
    assert timer.expired
    assert 0.05 <= timer.elapsed_s < 0.2
    timer.leave()


async def test_renewing_allots_the_budget_again(clock: Clock):
    timer = PausableTimer(5, clock=clock)
    timer.enter("run", None, nothing)
    clock.now += 6
    timer.leave()
    assert timer.overrun() == "the job's budget of 5 s"
    timer.renew()
    timer.enter("eval", None, nothing)
    assert timer.remaining_s == 5
    timer.leave()
