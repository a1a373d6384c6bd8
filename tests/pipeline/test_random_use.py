"""Whatever mixture of endings comes, every job is answered, and no slot, allowance, sandbox or leftover stays."""

import asyncio
import random
import time

from prorl_gym.handlers.base import EvalOutput, Job, Prepared, RunOutput
from prorl_gym.pipeline import Pipeline

from .kit import Live, OneHandler, Quick, Sandbox, config_of, ended, idle, request_of, until

KINDS = ["quick", "slow", "fails", "thread", "hesitates"]
PIPELINES = 60
JOBS = 40
GRACE_S = 5.0
"""So long that no handler here is abandoned, however loaded the machine is."""


class Erratic(Quick):
    """Does in each stage what the row says."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live

    async def _act(self, job: Job, stage: str) -> None:
        kind = job.request.instance[stage]
        if kind == "slow":
            await asyncio.sleep(0.02)
        elif kind == "fails":
            await asyncio.sleep(0)
            raise ValueError(stage)
        elif kind == "thread":
            await asyncio.to_thread(time.sleep, 0.002)
        elif kind == "hesitates":
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                await asyncio.sleep(0.005)

    async def init(self, job: Job) -> Prepared:
        runtime = Sandbox(self._live, stop_s=job.request.instance["stop_s"])
        job.adopt(runtime)
        await self._act(job, "init")
        return Prepared(runtime)

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        await self._act(job, "run")
        return await super().run(job, prepared)

    async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
        await self._act(job, "eval")
        return await super().eval(job, run_output)


async def test_no_slot_and_no_answer_is_ever_lost():
    async with asyncio.TaskGroup() as group:
        for _ in range(PIPELINES):
            group.create_task(_use(random.randrange(2**32)))


async def _use(seed: int) -> None:
    chance = random.Random(seed)
    live = Live()
    pools = (chance.randint(1, 4), chance.randint(1, 4), chance.randint(1, 4))
    config = config_of(pools=pools, ready_ahead=chance.randint(1, 4), cancel_grace_s=GRACE_S)
    pipeline = Pipeline(config, OneHandler(t=Erratic(live)))  # type: ignore[arg-type]
    await pipeline.start()
    try:
        tickets = []
        for number in range(JOBS):
            row = {stage: chance.choice(KINDS) for stage in ("init", "run", "eval")}
            row["stop_s"] = chance.choice([0, 0, 0.003])
            timeout = chance.choice([None, None, 0.01, 0.03])
            priority = chance.randrange(3)
            request = request_of(job_id=str(number), instance=row, timeout_s=timeout, priority=priority)
            tickets.append(pipeline.submit(request))
            if chance.random() < 0.3:
                await asyncio.sleep(chance.choice([0, 0, 0.005]))
            if chance.random() < 0.4:
                pipeline.cancel(job_ids=[str(chance.randrange(number + 1))])
            if chance.random() < 0.1:
                pipeline.resize(*(chance.randint(1, 4) for _ in range(3)))
            bound = pipeline.snapshot().pools
            assert bound["ready_ahead"]["taken"] <= 4
        for ticket in tickets:
            await ended(ticket, timeout_s=30)
        await until(lambda: idle(pipeline))
        now = pipeline.snapshot()
        assert live.now == 0
        assert now.leftovers == []
        assert not any(now.jobs[state] for state in ("queued", "init", "run", "eval"))
        assert sum(now.jobs.values()) == now.total == JOBS
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        await pipeline.stop()
