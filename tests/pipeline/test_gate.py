"""The way into a stage: order, resizing, and never a slot lost."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.pipeline.gate import Allowance, Gate


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def queued(gate: Gate, priorities: list[int], order: list[int]) -> list[asyncio.Task[None]]:
    async def enter(number: int, priority: int) -> None:
        await gate.enter(priority)
        order.append(number)

    tasks = [asyncio.create_task(enter(number, priority)) for number, priority in enumerate(priorities)]
    await settle()
    return tasks


async def test_higher_priority_first_and_first_come_first_served_within_one():
    gate, order = Gate(1), []
    await gate.enter()
    tasks = await queued(gate, [0, 5, 0, 5, -1], order)
    assert gate.waiting == 5
    for _ in range(5):
        gate.leave()
        await settle()
    assert order == [1, 3, 0, 2, 4]
    await asyncio.gather(*tasks)
    assert (gate.active, gate.waiting) == (1, 0)


async def test_nobody_overtakes_a_waiter_although_a_slot_is_free_for_a_moment():
    gate, order = Gate(1), []
    await gate.enter()
    first = await queued(gate, [0], order)
    gate.leave()
    late = asyncio.create_task(gate.enter(99))
    await asyncio.gather(*first)
    assert order == [0]
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert (gate.active, gate.waiting) == (1, 0)


async def test_growing_admits_at_once_and_shrinking_puts_nobody_out():
    gate, order = Gate(1), []
    await gate.enter()
    await queued(gate, [0, 0, 0], order)
    gate.resize(3)
    await settle()
    assert (order, gate.active) == ([0, 1], 3)
    gate.resize(1)
    assert gate.active == 3
    gate.leave()
    gate.leave()
    await settle()
    assert order == [0, 1]
    gate.leave()
    await settle()
    assert (order, gate.active) == ([0, 1, 2], 1)


async def test_a_slot_given_to_a_waiter_who_is_cancelled_in_the_same_moment_goes_on():
    gate, order = Gate(1, Allowance(5)), []
    await gate.enter()
    first, second = await queued(gate, [0, 0], order)
    gate.leave()
    first.cancel()
    await settle()
    assert first.cancelled() and order == [1]
    assert gate.active == 1
    gate.give_back()
    gate.give_back()
    await second


async def test_a_newcomer_is_not_stuck_behind_waiters_who_were_cancelled_but_have_not_noticed():
    gate, order = Gate(1), []
    await gate.enter()
    waiting = await queued(gate, [0, 0], order)
    for task in waiting:
        task.cancel()
    gate.leave()
    await asyncio.wait_for(gate.enter(), 1)
    await settle()
    assert (gate.active, gate.waiting) == (1, 0)


async def test_the_allowance_bounds_those_let_through_until_it_is_given_back():
    allowance = Allowance(2)
    gate, order = Gate(10, allowance), []
    await queued(gate, [0] * 4, order)
    assert order == [0, 1]
    gate.leave()
    await settle()
    assert order == [0, 1]
    gate.give_back()
    await settle()
    assert order == [0, 1, 2]
    gate.resize_allowance(3)
    await settle()
    assert order == [0, 1, 2, 3]


async def test_ten_thousand_cancelled_waiters_leave_no_heap_behind():
    gate, order = Gate(1), []
    await gate.enter()
    tasks = await queued(gate, [0] * 10_000, order)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert gate.waiting == 0
    assert len(gate._heap) < 200


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4), limit=st.integers(1, 5))
def test_whatever_is_cancelled_resized_or_finished_no_slot_is_lost(seed: int, size: int, limit: int):
    asyncio.run(_random_use(random.Random(seed), size, limit))


async def _random_use(chance: random.Random, size: int, limit: int) -> None:
    allowance = Allowance(limit)
    gate = Gate(size, allowance)
    inside = 0

    async def use(priority: int) -> None:
        nonlocal inside
        await gate.enter(priority)
        inside += 1
        try:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        finally:
            inside -= 1
            gate.give_back()
            gate.leave()

    tasks: list[asyncio.Task[None]] = []
    for _ in range(80):
        action = chance.random()
        if action < 0.5:
            tasks.append(asyncio.create_task(use(chance.randrange(3))))
        elif action < 0.75 and tasks:
            chance.choice(tasks).cancel()
        elif action < 0.85:
            gate.resize(chance.randrange(1, 5))
        else:
            await asyncio.sleep(0)
        assert gate.active >= inside
        assert allowance.taken <= limit
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert (gate.active, gate.waiting, allowance.taken) == (0, 0, 0)
