"""What a model call through the pool costs, beside the same call with bare aiohttp.

Both sides talk to one scripted engine in a process of its own, one after the other in each round, so that noise hits
both. CPU is of this process only, per call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson
import uvloop

from prorl_gym.backends.pool import BackendPool
from prorl_gym.config.models import BackendConfig
from prorl_gym.tokens.records import GenerateParams

PROMPT_TOKENS = 1024
SAMPLED_TOKENS = 128
ROUNDS = 5
CONCURRENCIES = (1, 64, 512)

Call = Callable[[], Awaitable[object]]


@dataclass
class Side:
    cpu_us: list[float] = field(default_factory=list)
    per_s: list[float] = field(default_factory=list)
    latency_us: list[float] = field(default_factory=list)

    def row(self) -> str:
        return (
            f"{statistics.median(self.per_s):>9.0f} {statistics.median(self.latency_us):>10.0f} "
            f"{statistics.median(self.cpu_us):>9.0f} {min(self.cpu_us):>9.0f}"
        )


@asynccontextmanager
async def engine() -> AsyncIterator[str]:
    """A scripted engine as its own process; yields its address."""
    script = {"replies": [{"text": "x" * (SAMPLED_TOKENS - 1)}]}
    with tempfile.TemporaryDirectory() as folder:
        path, address = Path(folder, "script.json"), Path(folder, "address")
        path.write_text(json.dumps(script))
        command = [sys.executable, "-m", "prorl_gym.testing.scripted_llm", "--script", str(path)]
        process = subprocess.Popen([*command, "--port", "0", "--address-file", str(address)], stdout=subprocess.DEVNULL)
        try:
            async with asyncio.timeout(20):
                while not address.exists():
                    await asyncio.sleep(0.02)
            yield address.read_text().strip()
        finally:
            process.terminate()
            process.wait(10)


@asynccontextmanager
async def never_waits(reason: str) -> AsyncIterator[None]:
    yield


async def measure(side: Side, call: Call, concurrency: int, total: int) -> None:
    latencies: list[float] = []

    async def worker() -> None:
        for _ in range(total // concurrency):
            began = time.perf_counter()
            await call()
            latencies.append(time.perf_counter() - began)

    wall, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    count = len(latencies)
    side.cpu_us.append((time.process_time() - cpu) / count * 1e6)
    side.per_s.append(count / (time.perf_counter() - wall))
    side.latency_us.append(statistics.median(latencies) * 1e6)


async def main(rounds: int) -> None:
    prompt = [index % 256 for index in range(PROMPT_TOKENS)]
    params = GenerateParams(max_tokens=SAMPLED_TOKENS)
    body = {"model": "scripted", "prompt": prompt, "max_tokens": SAMPLED_TOKENS, "logprobs": 0}
    print(f"prompt {PROMPT_TOKENS}, sampled {SAMPLED_TOKENS} tokens; median of {rounds} rounds, CPU also minimum\n")
    print(f"{'concurrent':>10} {'':<14} {'calls/s':>9} {'p50 us':>10} {'CPU us':>9} {'min':>9}")
    pool = BackendPool(BackendConfig())
    async with (
        engine() as address,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
        ) as bare_session,
    ):
        await pool.add(address)

        async def bare() -> object:
            content = orjson.dumps({**body, "return_token_ids": True, "temperature": 1.0})
            headers = {"Content-Type": "application/json"}
            async with bare_session.post(f"{address}/v1/completions", data=content, headers=headers) as response:
                return orjson.loads(await response.read())

        async with pool.session("bench", never_waits) as session:
            for concurrency in CONCURRENCIES:
                floor, ours = Side(), Side()
                total = max(512, concurrency * 4)
                for _ in range(rounds):
                    await measure(floor, bare, concurrency, total)
                    await measure(ours, lambda: session.generate(prompt, params), concurrency, total)
                print(f"{concurrency:>10} {'bare aiohttp':<14} {floor.row()}")
                print(f"{'':>10} {'pool':<14} {ours.row()}")
                over, ratio = min(ours.cpu_us) - min(floor.cpu_us), min(ours.cpu_us) / min(floor.cpu_us)
                print(f"{'':>10} {'overhead':<14} {over:>+40.0f}  ({ratio:.2f} x the floor)")
    await pool.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    uvloop.run(main(1 if parser.parse_args().quick else ROUNDS))
