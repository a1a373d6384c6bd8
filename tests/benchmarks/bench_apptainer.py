"""Start of Apptainer's sandboxes to the first tool result, their stop, memory, and many at once.

Floor: the same program run in the same image by bare `apptainer exec`, without our tools. Needs Apptainer and, the
first time, mmdebstrap and a Debian mirror for the base image.
Run it on an idle machine: `python tests/benchmarks/bench_apptainer.py [--quick] [--image FILE.sif]`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from prorl_gym.config.models import PathsConfig, RuntimeConfig
from prorl_gym.errors import ConfigError
from prorl_gym.runtimes.base import Runtime, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory
from prorl_gym.toolserver.children import descendants

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.runtimes.base_image import base_image

MANY = 16
TARGETS_MS = {"folder": "300", ".sif": "450"}


async def start_and_stop(factory: RuntimeFactory, spec: SandboxSpec) -> tuple[float, float]:
    """Seconds to the first tool result, and of the stop."""
    runtime = factory.create(spec)
    began = time.perf_counter()
    try:
        await runtime.start()
        await echo(runtime)
        up = time.perf_counter()
    finally:
        await runtime.stop()
    return up - began, time.perf_counter() - up


async def echo(runtime: Runtime) -> None:
    reply = await runtime.call("bash", {"command": "echo hi"}, timeout_s=30)
    if reply.text != "hi\n":
        raise RuntimeError(reply.text)


async def echo_ms(factory: RuntimeFactory, spec: SandboxSpec, repeats: int) -> float:
    samples = []
    async with factory.create(spec) as runtime:
        for _ in range(repeats):
            began = time.perf_counter()
            await echo(runtime)
            samples.append(time.perf_counter() - began)
    return statistics.median(samples) * 1000


async def at_once(factory: RuntimeFactory, spec: SandboxSpec) -> float:
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(MANY):
            group.create_task(start_and_stop(factory, spec))
    return time.perf_counter() - began


async def memory_mb(factory: RuntimeFactory, spec: SandboxSpec) -> float:
    async with factory.create(spec) as runtime:
        await echo(runtime)
        pid = runtime.describe().pid or 0
        sizes = []
        for each in (pid, *descendants(pid)):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            sizes.append(next(int(line.split()[1]) for line in lines if line.startswith("Pss:")))
    return sum(sizes) / 1024


def floor_ms(image: str, folder: Path, repeats: int) -> float:
    command = ["apptainer", "--silent", "exec", "--userns", "--containall", "--net", "--network", "none",
               "--writable-tmpfs", image, "true"]  # fmt: skip
    own = {name: str(folder) for name in ("HOME", "APPTAINER_CONFIGDIR", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR")}
    samples = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run(command, env={"PATH": os.environ["PATH"], **own}, check=True)
        samples.append(time.perf_counter() - began)
    return statistics.median(samples) * 1000


async def measure(factory: RuntimeFactory, spec: SandboxSpec, folder: Path, repeats: int) -> list[str]:
    pairs = [await start_and_stop(factory, spec) for _ in range(repeats + 2)][2:]
    starts, stops = ([pair[index] * 1000 for pair in pairs] for index in (0, 1))
    many_s = await at_once(factory, spec)
    kind = "folder" if Path(spec.image or "").is_dir() else ".sif"
    target = "" if spec.fakeroot else TARGETS_MS[kind]
    floor = "" if spec.fakeroot else f"{floor_ms(spec.image or '', folder, repeats):.0f}"
    return [
        kind + (", fakeroot" if spec.fakeroot else ""), floor, f"{statistics.median(starts):.0f}", f"{max(starts):.0f}",
        target, f"{statistics.median(stops):.0f}", f"{await echo_ms(factory, spec, repeats * 10):.2f}",
        f"{many_s:.1f} ({MANY * 60 / many_s:.0f}/min)", f"{await memory_mb(factory, spec):.0f}",
    ]  # fmt: skip


async def main(repeats: int, image: str | None) -> None:
    console = Console(width=120)
    if shutil.which("apptainer") is None or (image is None and shutil.which("mmdebstrap") is None):
        console.print("left out: needs apptainer and mmdebstrap (scripts/install_apptainer.sh)")
        return
    images = [image] if image else [str(base_image() / name) for name in ("base", "base.sif")]
    table = Table(title=f"apptainer, ms where nothing is said, medians of {repeats} (load {os.getloadavg()[0]:.1f})")
    for name in ("image", "bare exec", "start", "slowest", "target", "stop", "echo", f"{MANY} at once, s", "MB idle"):
        table.add_column(name)
    with tempfile.TemporaryDirectory() as name:
        state = Path(name)
        factory = RuntimeFactory(RuntimeConfig(), PathsConfig(state=state, images=state))
        try:
            await factory.prepare(["apptainer"])
            for each in images:
                spec = SandboxSpec(kind="apptainer", image=each)
                for wanted in (spec, replace(spec, fakeroot=True)):
                    table.add_row(*await measure(factory, wanted, state, repeats))
        except ConfigError as error:
            console.print(f"left out: {error}")
            return
        finally:
            await factory.stop()
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a third of the runs")
    parser.add_argument("--image", help="a .sif or folder instead of the small Debian")
    arguments = parser.parse_args()
    asyncio.run(main(5 if arguments.quick else 15, arguments.image))
