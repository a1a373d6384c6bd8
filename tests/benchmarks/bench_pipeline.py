"""The pipeline alone: how well its stages overlap, and what a job costs that does nothing.

`python tests/benchmarks/bench_pipeline.py`. No HTTP, no sandbox, no model. Stages that sleep show the overlap; the
floor is what pools of those sizes can do at best. CPU per job and the best of the repeats hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from prorl_gym.config.models import PathsConfig, PipelineConfig, PoolConfig, ProrlConfig
from prorl_gym.handlers.base import AgentHandler, EvalOutput, HandlerContext, Job, Prepared, RunOutput
from prorl_gym.handlers.registry import HandlerRegistry
from prorl_gym.pipeline import Pipeline
from prorl_gym.server.serve import spare_the_collector
from prorl_gym.types import JobRequest, StopReason

STAGES_S = (0.2, 0.6, 0.2)
POOLS = (4, 12, 4)
JOBS = 60
NOOP_JOBS, NOOP_BATCH = 10_000, 1_000
HELD_JOBS = 2_000
REPEATS = 3

Make = Callable[..., Awaitable[Pipeline]]


class Sleeping(AgentHandler):
    """Each stage sleeps."""

    async def init(self, job: Job) -> Prepared:
        await asyncio.sleep(STAGES_S[0])
        return Prepared()

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        await asyncio.sleep(STAGES_S[1])
        return RunOutput(StopReason.ANSWERED)

    async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
        await asyncio.sleep(STAGES_S[2])
        return EvalOutput(1.0)


class NoOp(AgentHandler):
    """Each stage returns at once, as `async def`."""

    async def init(self, job: Job) -> Prepared:
        return Prepared()

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        return RunOutput(StopReason.ANSWERED)

    async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
        return EvalOutput(1.0)


class Blocking(AgentHandler):
    """Each stage returns at once, as plain `def`, so from a thread."""

    def init(self, job: Job) -> Prepared:
        return Prepared()

    def run(self, job: Job, prepared: Prepared) -> RunOutput:
        return RunOutput(StopReason.ANSWERED)

    def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
        return EvalOutput(1.0)


class Holding(NoOp):
    """RUN waits until it is cancelled."""

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        await asyncio.Event().wait()
        raise AssertionError


async def pipeline_of(handler: type[AgentHandler], pools: tuple[int, int, int]) -> Pipeline:
    """A running pipeline whose only task is that handler."""
    init, run, evaluate = (PoolConfig(workers=workers) for workers in pools)
    config = ProrlConfig(
        handlers={"bench": f"{__name__}:{handler.__name__}"},
        pipeline=PipelineConfig(init=init, run=run, eval=evaluate),
        paths=PathsConfig(state=Path("unused"), images=Path("unused")),
    )

    def context(task: str) -> HandlerContext:
        return HandlerContext(task, config, lambda name: None, lambda spec: None)  # type: ignore[arg-type,return-value]

    pipeline = Pipeline(config, HandlerRegistry(config, context))
    await pipeline.start()
    return pipeline


async def finish(pipeline: Pipeline, count: int) -> None:
    """Put that many jobs in at once and wait for all."""
    request = JobRequest(task="bench", instance={"instance_id": "row"})
    tickets = [pipeline.submit(request) for _ in range(count)]
    for ticket in tickets:
        await ticket.wait()


async def overlap(table: Table) -> None:
    """Makespan against the floor of the pools and against sequential workers."""
    pipeline = await pipeline_of(Sleeping, POOLS)
    begun = time.perf_counter()
    await finish(pipeline, JOBS)
    makespan = time.perf_counter() - begun
    await pipeline.stop()
    per_stage = [JOBS / workers * seconds for workers, seconds in zip(POOLS, STAGES_S, strict=True)]
    floor = max(per_stage) + sum(STAGES_S) - STAGES_S[per_stage.index(max(per_stage))]
    sequential = -(-JOBS // POOLS[1]) * sum(STAGES_S)
    table.add_row(
        f"{JOBS} jobs of {'/'.join(map(str, STAGES_S))} s, pools {'/'.join(map(str, POOLS))}",
        f"{makespan:.3f} s",
        f"floor {floor:.1f} s: {makespan / floor:.3f} x",
    )
    table.add_row(
        f"the same in {POOLS[1]} sequential workers", f"{sequential:.1f} s", f"{sequential / makespan:.2f} x slower"
    )


async def cost(table: Table, handler: type[AgentHandler], count: int, repeats: int) -> None:
    """Jobs per second and CPU per job, the best of the repeats."""
    rate, cpu = 0.0, float("inf")
    for _ in range(repeats):
        pipeline = await pipeline_of(handler, (64, 64, 64))
        gc.collect()
        begun, begun_cpu = time.perf_counter(), time.process_time()
        for _ in range(0, count, NOOP_BATCH):
            await finish(pipeline, NOOP_BATCH)
        rate = max(rate, count / (time.perf_counter() - begun))
        cpu = min(cpu, (time.process_time() - begun_cpu) / count)
        await pipeline.stop()
    loop = type(asyncio.get_running_loop()).__module__.split(".")[0]
    table.add_row(f"no-op jobs, {handler.__name__}, {loop}", f"{rate:,.0f} jobs/s", f"{cpu * 1e6:.0f} us CPU a job")


async def held(table: Table) -> None:
    """Memory of jobs that are all in RUN, the time of a snapshot, and of cancelling all."""
    pipeline = await pipeline_of(Holding, (64, HELD_JOBS, 64))
    await finish_none(pipeline)
    gc.collect()
    before = resident_bytes()
    for number in range(HELD_JOBS):
        pipeline.submit(JobRequest(job_id=f"held-{number}", task="bench", instance={"instance_id": str(number)}))
    while pipeline.snapshot().active_run < HELD_JOBS:
        await asyncio.sleep(0.01)
    grown = resident_bytes() - before
    begun = time.perf_counter()
    pipeline.snapshot()
    snapshot = time.perf_counter() - begun
    begun = time.perf_counter()
    report = pipeline.cancel(prefix="held-")
    answered = time.perf_counter() - begun
    await pipeline.stop()
    table.add_row(f"{HELD_JOBS:,} jobs in RUN", f"{grown / 2**20:.1f} MiB", f"{grown / HELD_JOBS / 1024:.1f} KiB a job")
    table.add_row("snapshot for /status meanwhile", f"{snapshot * 1e6:.0f} us", "")
    table.add_row(f"cancel of {len(report.cancelled):,} jobs, all answered", f"{answered * 1e3:.1f} ms", "")


async def finish_none(pipeline: Pipeline) -> None:
    """One job there and back, so that imports and pools are warm."""
    ticket = pipeline.submit(JobRequest(job_id="warm", task="bench", instance={}))
    await asyncio.sleep(0.01)
    pipeline.cancel(job_ids=[ticket.id])


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def everything(table: Table, repeats: int) -> None:
    """All rows under one loop."""
    await overlap(table)
    await held(table)
    await cost(table, NoOp, NOOP_JOBS, repeats)
    await cost(table, Blocking, NOOP_BATCH, repeats)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    repeats = 1 if parser.parse_args().quick else REPEATS
    spare_the_collector()  # as the service does
    table = Table("what", "measured", "against", title="pipeline")
    asyncio.run(everything(table, repeats))
    uvloop.run(cost(table, NoOp, NOOP_JOBS, repeats))
    Console().print(table)


if __name__ == "__main__":
    main()
