"""Hundreds of jobs in real sandboxes that end in every way: nothing piles up, and every one of them ends.

Cases: descriptors and zombies that pile up until no process can be started any more; a child's exit that gets lost
under heavy spawning, and a wait in the teardown that never ends.
"""

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from handlers.kit import call, config_of, environment, serving

from prorl_gym.pipeline import Pipeline, Ticket
from prorl_gym.testing import Reply, ScriptedLlm
from prorl_gym.testing.script import Conversation, Script
from prorl_gym.types import JobRequest, JobStatus

POOLS = {"init": {"workers": 4}, "run": {"workers": 8}, "eval": {"workers": 4}}
SPAWNING = "for i in 1 2 3 4 5; do (sleep 0.01; exit $i) & /bin/true; done; wait"


def processes() -> dict[int, str]:
    """This process and all below it: pid and state."""
    parents: dict[int, int] = {}
    states: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            states[int(folder.name)], parents[int(folder.name)] = fields[0], int(fields[1])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return {pid: states[pid] for pid in ours}


def descriptors() -> int:
    """Open files of all these processes."""
    gc.collect()
    count = 0
    for pid in processes():
        try:
            count += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except OSError:
            continue
    return count


def zombies() -> int:
    return sum(state == "Z" for state in processes().values())


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def idle(pipeline: Pipeline) -> bool:
    now = pipeline.snapshot()
    return not any((now.active_init, now.active_run, now.active_eval, now.leftovers, now.pools["ready_ahead"]["taken"]))


async def reached(ticket: Ticket, status: JobStatus) -> None:
    await until(lambda: ticket.status is status or ticket.outcome is not None, timeout_s=600)


@pytest.mark.parametrize("count", [90, pytest.param(501, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_no_descriptor_and_no_zombie_stays_of_jobs_that_end_time_out_or_are_cancelled(
    tmp_path: Path, count: int
) -> None:
    script = Script(
        conversations=(
            Conversation("short", (Reply(text=call("bash", command="echo hi | cat")), Reply(text="done"))),
            Conversation("long", (Reply(text=call("bash", command="sleep 60 & sleep 60")),)),
        )
    )
    served = environment(resources_type=None, resources_name=None)
    config = config_of(tmp_path, served, runtime={"kind": "bubblewrap"}, pipeline=POOLS)
    async with ScriptedLlm(script) as llm, serving(config, llm) as pipeline:

        def submit(number: int) -> Ticket:
            kind = "short" if number % 3 == 0 else "long"
            fields = {"stage_timeouts_s": {"run": 0.1}} if number % 3 == 1 else {}
            row = {"question": f"A {kind} one, number {number}."}
            return pipeline.submit(JobRequest(task="world", instance=row, **fields))

        async def cancelled(ticket: Ticket, stage: JobStatus) -> None:
            await reached(ticket, stage)
            pipeline.cancel(job_ids=[ticket.id])

        async def many(count: int) -> Counter[str]:
            stages = (JobStatus.INIT, JobStatus.RUN, JobStatus.RUN)
            tickets = [submit(number) for number in range(count)]
            async with asyncio.TaskGroup() as group:
                for number in range(2, count, 3):
                    group.create_task(cancelled(tickets[number], stages[number // 3 % 3]))
            ended = [await ticket.wait(timeout_s=60) for ticket in tickets]
            await until(lambda: idle(pipeline))
            return Counter(outcome.status.value if outcome else "lost" for outcome in ended)

        await many(12)
        before = descriptors()
        assert await many(count) == {"completed": count // 3, "timeout": count // 3, "cancelled": count // 3}
        await until(lambda: descriptors() - before < 10 and zombies() == 0, timeout_s=10)


@pytest.mark.parametrize(
    ("jobs", "commands"), [(64, 8), pytest.param(200, 20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_every_job_ends_under_a_heavy_load_of_short_lived_processes(
    tmp_path: Path, jobs: int, commands: int
) -> None:
    quick = Reply(text=call("bash", command=SPAWNING))
    slow = Reply(text=call("bash", command=f"(sleep 60 &); {SPAWNING}; sleep 60", timeout_s=1))
    script = Script(
        conversations=(
            Conversation("killed", (quick, slow)),
            Conversation("number", (*(slow if n % 4 == 3 else quick for n in range(commands)), Reply(text="."))),
        )
    )
    served = environment({"max_turns": commands + 1}, resources_type=None, resources_name=None)
    pools = {**POOLS, "run": {"workers": min(jobs, 64)}}
    config = config_of(tmp_path, served, runtime={"kind": "bubblewrap"}, pipeline=pools)
    async with ScriptedLlm(script) as llm, serving(config, llm) as pipeline:
        tickets = []
        for number in range(jobs):
            killed = number % 3 == 0
            row = {"question": f"One to be {'killed' if killed else 'kept'}, number {number}."}
            fields = {"stage_timeouts_s": {"run": 1.5}} if killed else {}
            tickets.append(pipeline.submit(JobRequest(task="world", instance=row, **fields)))
        ended = [await ticket.wait(timeout_s=60 + jobs) for ticket in tickets]
        await until(lambda: idle(pipeline))
        status = Counter(outcome.status.value if outcome else "lost" for outcome in ended)
        assert status == {"timeout": len(range(0, jobs, 3)), "completed": jobs - len(range(0, jobs, 3))}
        for outcome in ended:
            assert outcome is not None
            if outcome.status is JobStatus.COMPLETED:
                assert outcome.trajectory.num_turns == commands + 1
            else:
                assert outcome.timing.active["run"] < 1.5 + config.pipeline.cancel_grace_s
    assert zombies() == 0
