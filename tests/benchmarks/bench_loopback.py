"""Leases of loopback addresses, from several processes at once, against a file under a lock; sandboxes that have them.

Run it on an idle machine: `python tests/benchmarks/bench_loopback.py [--sandboxes 512] [--quick]`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from prorl_gym.config.models import PathsConfig, RuntimeConfig
from prorl_gym.errors import ConfigError
from prorl_gym.runtimes.base import SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory
from prorl_gym.runtimes.loopback import ADDRESSES, LoopbackAddresses, nth_address
from prorl_gym.toolserver.children import descendants

PROCESSES, LEASES = 4, 128


def names() -> Callable[[], str]:
    """Ours: abstract socket names."""
    addresses, held = LoopbackAddresses(), []

    def lease() -> str:
        held.append(addresses.lease())
        return held[-1].address

    return lease


def file_under_lock(path: Path) -> Callable[[], str]:
    """What a correct file would cost: read, look for a free one, write anew, all under one lock."""

    def lease() -> str:
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            taken = json.loads(file.read() or "{}")
            address = next(a for a in map(nth_address, range(ADDRESSES)) if a not in taken)
            taken[address] = time.time()
            file.seek(0)
            file.truncate()
            json.dump(taken, file)
            return address

    return lease


def worker(make: Callable[[], Callable[[], str]], barrier: Any, results: Any) -> None:
    lease = make()
    barrier.wait()
    taken = []
    for _ in range(LEASES):
        started = time.perf_counter()
        address = lease()
        taken.append((address, time.perf_counter() - started))
    results.put(taken)
    barrier.wait()  # all are held until all are taken


def leases(make: Callable[[], Callable[[], str]]) -> list[tuple[str, float]]:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(PROCESSES), context.Queue()
    workers = [context.Process(target=worker, args=(make, barrier, results)) for _ in range(PROCESSES)]
    for process in workers:
        process.start()
    taken = [lease for _ in workers for lease in results.get(timeout=60)]
    for process in workers:
        process.join()
    return taken


def lease_row(name: str, taken: list[tuple[str, float]]) -> list[str]:
    times = sorted(1e6 * seconds for _, seconds in taken)
    collisions = len(taken) - len({address for address, _ in taken})
    return [name, f"{statistics.median(times):.0f}", f"{times[int(0.99 * len(times))]:.0f}", str(collisions)]


def pss_mb(pids: Iterator[int]) -> float:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


async def sandboxes(state: Path, count: int) -> list[list[str]]:
    factory = RuntimeFactory(RuntimeConfig(), PathsConfig(state=state, images=state))
    spec = SandboxSpec("bubblewrap", network="host", start_timeout_s=600)
    try:
        await factory.prepare(["bubblewrap"])
        async with contextlib.AsyncExitStack() as stack:
            boxes = [factory.create(spec) for _ in range(count)]
            started = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for box in boxes:
                    group.create_task(stack.enter_async_context(box))
            took = time.perf_counter() - started
            described = [box.describe() for box in boxes]
            trees = (below for one in described if one.pid for below in (one.pid, *descendants(one.pid)))
            memory = await asyncio.to_thread(pss_mb, trees)
        return [
            ["alive at once", str(count)],
            ["different addresses", str(len({one.address for one in described}))],
            ["started", f"{took:.1f} s ({60 * count / took:.0f} a minute)"],
            ["memory of one (PSS)", f"{memory / count:.1f} MB"],
            ["left after the end", str(len(factory.leftovers()) + len(list((state / "records").iterdir())))],
        ]
    finally:
        await factory.stop()


def main(count: int) -> None:
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o755)  # else the sandboxes' users may not pass, and their state is kept elsewhere
        title = f"{PROCESSES * LEASES} leases held at once, {PROCESSES} processes taking {LEASES} each"
        table = Table("", "median us", "p99 us", "collisions", title=title)
        table.add_row(*lease_row("abstract socket names", leases(names)))
        table.add_row(*lease_row("JSON file under a lock", leases(partial(file_under_lock, path / "leases.json"))))
        console.print(table)
        try:
            table = Table("", "", title="bubblewrap with network: host")
            for row in asyncio.run(sandboxes(path / "state", count)):
                table.add_row(*row)
            console.print(table)
        except ConfigError as error:
            console.print(f"sandboxes left out: {error}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sandboxes", type=int, default=64, help="alive at once")
    parser.add_argument("--quick", action="store_true", help="16 sandboxes")
    options = parser.parse_args()
    main(16 if options.quick else options.sandboxes)
