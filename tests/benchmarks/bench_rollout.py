"""What a rollout costs the service: three model calls and two bash calls, through pipeline, handler, loop and record.

`python tests/benchmarks/bench_rollout.py [--quick]`. The policy is a scripted engine of zero latency in a process of
its own, the `local` sandboxes are kept warm. The floor does the same I/O with nothing around it: three POSTs of the
same bodies over kept-alive aiohttp connections and two calls to the same kind of shell. CPU is that of this process
alone, which holds the service and neither engine nor sandboxes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from prorl_gym.backends.registry import BackendRegistry
from prorl_gym.config.models import ProrlConfig
from prorl_gym.handlers.base import HandlerContext
from prorl_gym.handlers.registry import HandlerRegistry
from prorl_gym.pipeline import Pipeline
from prorl_gym.rollout.policy import Policy
from prorl_gym.runtimes.base import Runtime, RuntimeInfo, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory
from prorl_gym.testing.byte_renderer import byte_renderer
from prorl_gym.tools.spec import ToolReply
from prorl_gym.types import JobRequest

ROOT = Path(__file__).parents[2]
COMMAND = "echo hi"
CALL = f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{COMMAND}"}}}}\n</tool_call>'
REPLIES = [{"text": CALL}, {"text": f"Again. {CALL}"}, {"text": "Done."}]
CONCURRENCIES = (1, 16)
ROLLOUTS = {1: 200, 16: 800}
WARM_UP = 40
TARGET_CPU_MS = 5.0
WORLD = """
from prorl_gym.resources.base import ResourcesServer, Verdict

class World(ResourcesServer):
    async def verify(self, session_id, row, outcome):
        return Verdict(1.0, resolved=True)
"""

Rollout = Callable[[int], Awaitable[None]]


class Warm(Runtime):
    """A started sandbox that outlives its jobs."""

    def __init__(self, inner: Runtime, idle: list[Warm]) -> None:
        self.inner, self.spec, self._idle = inner, inner.spec, idle

    async def start(self) -> None:
        """It runs already."""

    async def stop(self) -> None:
        """Go back to the idle ones."""
        if self not in self._idle:
            self._idle.append(self)

    async def call(self, tool: str, arguments: dict[str, Any], *, timeout_s: float) -> ToolReply:
        """Pass on."""
        return await self.inner.call(tool, arguments, timeout_s=timeout_s)

    async def copy_in(self, source: Path | bytes, target: str) -> None:
        """Pass on."""
        await self.inner.copy_in(source, target)

    async def copy_out(self, source: str, *, max_bytes: int) -> bytes:
        """Pass on."""
        return await self.inner.copy_out(source, max_bytes=max_bytes)

    def describe(self) -> RuntimeInfo:
        """Pass on."""
        return self.inner.describe()


def config_of(folder: Path) -> ProrlConfig:
    """One environment with bash, and room for every rollout at once."""
    world = folder / "root" / "resources_servers" / "world"
    world.mkdir(parents=True)
    (world / "app.py").write_text(WORLD)
    workers = {"workers": 4 * max(CONCURRENCIES)}
    environment = {
        "name": "world_agent",
        "agent_type": "tool_calling",
        "agent": {"tools": ["bash"]},
        "resources_type": "world",
        "resources_name": "world",
        "resources": {},
    }
    return ProrlConfig.model_validate(
        {
            "environments": [environment],
            "pipeline": {"init": workers, "run": workers, "eval": workers},
            "runtime": {"kind": "local"},
            "paths": {"state": folder / "state", "images": folder / "images"},
            "roots": [folder / "root", ROOT],
        }
    )


async def measure(rollout: Rollout, concurrency: int, count: int) -> tuple[float, float, float]:
    """Rollouts a second, median milliseconds, CPU milliseconds of this process per rollout."""
    latencies: list[float] = []

    async def work(lane: int, jobs: int) -> None:
        for _ in range(jobs):
            began = time.perf_counter()
            await rollout(lane)
            latencies.append(time.perf_counter() - began)

    await asyncio.gather(*(work(lane, WARM_UP // concurrency + 1) for lane in range(concurrency)))
    latencies.clear()
    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(work(lane, count // concurrency) for lane in range(concurrency)))
    elapsed, used = time.perf_counter() - began, time.process_time() - cpu
    return len(latencies) / elapsed, statistics.median(latencies) * 1e3, used / len(latencies) * 1e3


class Bench:
    """The service's parts, wired as the service wires them, and the floor beside them."""

    def __init__(self, folder: Path, llm: str) -> None:
        self.config = config_of(folder)
        self.llm = llm
        self.engines = BackendRegistry(self.config.backend)
        self.runtimes = RuntimeFactory(self.config.runtime, self.config.paths)
        self.warm: list[Warm] = []
        self.idle: list[Warm] = []
        renderer = byte_renderer()
        policy = Policy("default", self.config.policy, self.engines.pool("default"), load=lambda *_: renderer)
        self.handlers = HandlerRegistry(
            self.config, lambda task: HandlerContext(task, self.config, lambda _: policy, lambda _: self.idle.pop())
        )
        self.pipeline = Pipeline(self.config, self.handlers)
        self.bodies: list[bytes] = []

    async def start(self) -> None:
        """Bring everything up and take down what one rollout sends to the engine."""
        await self.runtimes.prepare({"local"})
        for _ in range(max(CONCURRENCIES)):
            runtime = self.runtimes.create(SandboxSpec("local"))
            await runtime.start()
            self.warm.append(Warm(runtime, self.idle))
        self.idle.extend(self.warm)
        await self.engines.start()
        await self.engines.pool("default").add(self.llm, policy_version=1)
        await self.handlers.start()
        await self.pipeline.start()
        self.bodies = await self._bodies()

    async def stop(self) -> None:
        """Take it down."""
        await self.pipeline.stop()
        await self.handlers.stop()
        for warm in self.warm:
            await warm.inner.stop()
        await self.runtimes.stop()
        await self.engines.stop()

    async def rollout(self, lane: int) -> None:
        """One job, submit to result, encoded as our own clients ask for it."""
        outcome = await self.pipeline.submit(self._request()).wait()
        if outcome is None or outcome.score.reward != 1.0 or outcome.trajectory.num_turns != len(REPLIES):
            raise RuntimeError(f"a rollout went wrong: {outcome and outcome.failure}")
        orjson.dumps(outcome.result(["segments"]))

    def floor(self, session: aiohttp.ClientSession) -> Rollout:
        """The same I/O with nothing around it."""

        async def rollout(lane: int) -> None:
            for turn, body in enumerate(self.bodies):
                async with session.post(f"{self.llm}/v1/completions", data=body) as response:
                    orjson.loads(await response.read())
                if turn < len(self.bodies) - 1:
                    await self.warm[lane].inner.call("bash", {"command": COMMAND}, timeout_s=10)

        return rollout

    def _request(self) -> JobRequest:
        return JobRequest(task="world", instance={"question": "Say hi twice."}, include=("segments",))

    async def _bodies(self) -> list[bytes]:
        outcome = await self.pipeline.submit(self._request()).wait()
        if outcome is None or outcome.failure is not None:
            raise RuntimeError(f"the first rollout went wrong: {outcome and outcome.failure}")
        said = [m for m in outcome.result()["messages"] if m["role"] == "assistant"]
        options = {"model": "scripted", "max_tokens": 400, "temperature": 1.0, "logprobs": 0, "return_token_ids": True}
        return [orjson.dumps({"prompt": message["input_ids"], **options}) for message in said]


async def run(folder: Path, llm: str, share: float) -> Table:
    """Measure floor and service, one after the other, at each concurrency."""
    table = Table(title="three model calls + two bash calls, engine of zero latency, local runtime kept warm")
    for column in ("concurrency", "what", "rollouts/s", "p50 ms", "CPU ms per rollout", "ratio of CPU", "target"):
        table.add_column(column, justify="left" if column == "what" else "right")
    bench = Bench(folder, llm)
    await bench.start()
    try:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            for concurrency in CONCURRENCIES:
                count = round(share * ROLLOUTS[concurrency])
                floor = await measure(bench.floor(session), concurrency, count)
                service = await measure(bench.rollout, concurrency, count)
                rows = (("floor: the same I/O", floor, ""), ("service", service, f"≤ {TARGET_CPU_MS:g} ms CPU"))
                for what, (rate, p50, cpu), target in rows:
                    ratio = f"{cpu / floor[2]:.1f}"
                    table.add_row(str(concurrency), what, f"{rate:.0f}", f"{p50:.1f}", f"{cpu:.2f}", ratio, target)
    finally:
        await bench.stop()
    return table


def main() -> None:
    """Start the engine, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fifth of the rollouts")
    share = 0.2 if parser.parse_args().quick else 1.0
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.json").write_text(json.dumps({"replies": REPLIES}))
        command = [sys.executable, "-m", "prorl_gym.testing.scripted_llm", "--script", str(folder / "script.json")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
            try:
                assert engine.stdout is not None
                address = engine.stdout.readline().strip()
                table = uvloop.run(run(folder, address, share))
            finally:
                engine.terminate()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
