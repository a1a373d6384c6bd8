"""Latency, start and memory of the sandbox's tools, against floors measured in the same run.

Floors: bash on a bare terminal with its status on an extra descriptor; IPython's shell called in this process. The
peers have a benchmark of their own.
Run it on an idle machine: `python tests/benchmarks/bench_tools.py [--quick]`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import pty
import select
import statistics
import tempfile
import termios
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from prorl_gym.config.models import PathsConfig, RuntimeConfig
from prorl_gym.errors import ConfigError
from prorl_gym.runtimes.base import Runtime, RuntimeKind, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory
from prorl_gym.toolserver.children import descendants

COMMANDS = {"echo hi": "echo hi", "/bin/true": "/bin/true", "cat 100 kB": "cat {folder}/100kB"}
CELLS = {"1+1": "1+1", "print 100 kB": "print('x' * 100_000)"}


def median_ms(samples: list[float]) -> float:
    return statistics.median(samples) * 1000


def timed(call: Callable[[], object], repeats: int, warm_up: int = 5) -> list[float]:
    samples = []
    for number in range(warm_up + repeats):
        started = time.perf_counter()
        call()
        if number >= warm_up:
            samples.append(time.perf_counter() - started)
    return samples


async def timed_async(call: Callable[[], Awaitable[object]], repeats: int, warm_up: int = 5) -> list[float]:
    samples = []
    for number in range(warm_up + repeats):
        started = time.perf_counter()
        await call()
        if number >= warm_up:
            samples.append(time.perf_counter() - started)
    return samples


class BareTerminal:
    """The floor: nothing but bash on a terminal, and a descriptor for the status."""

    def __init__(self) -> None:
        status_read, status_write = os.pipe()
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.dup2(status_write, 9)
            os.execve(
                "/bin/bash", ["bash", "--noprofile", "--norc", "--noediting"], {"PS1": "", "PATH": "/usr/bin:/bin"}
            )
        os.close(status_write)
        self.status = status_read
        self.number = 0
        modes = termios.tcgetattr(self.terminal)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(self.terminal, termios.TCSANOW, modes)

    def run(self, command: str) -> bytes:
        self.number += 1
        os.write(self.terminal, f"{command}; echo $? {self.number} >&9\n".encode())
        output, status = b"", b""
        while True:
            ready, _, _ = select.select([self.terminal, self.status], [], [], 10)
            if self.terminal in ready:
                output += os.read(self.terminal, 65536)
            if self.status in ready:
                status += os.read(self.status, 100)
                if status.endswith(f" {self.number}\n".encode()):
                    return output

    def close(self) -> None:
        os.close(self.terminal)
        os.close(self.status)
        os.waitpid(self.pid, 0)


def bash_floor(folder: str, repeats: int) -> dict[str, float]:
    terminal = BareTerminal()
    try:
        return {
            name: median_ms(timed(lambda c=command: terminal.run(c.format(folder=folder)), repeats))
            for name, command in COMMANDS.items()
        }
    finally:
        terminal.close()


def ipython_shell() -> Callable[[str], None]:
    """Run a cell in a bare shell of this process."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)

    def run(code: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            shell.run_cell(code)

    return run


def ipython_floor(repeats: int) -> dict[str, float]:
    run = ipython_shell()
    return {name: median_ms(timed(lambda c=code: run(c), repeats)) for name, code in CELLS.items()}


async def tools(runtime: Runtime, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    await runtime.copy_in(b"x" * 99 + b"\n" + b"y" * 99_900, "100kB")
    folder = (await runtime.call("bash", {"command": "printf %s $PWD"}, timeout_s=5)).text
    bash, ipython = {}, {}
    for name, command in COMMANDS.items():
        arguments = {"command": command.format(folder=folder)}
        bash[name] = median_ms(await timed_async(lambda a=arguments: runtime.call("bash", a, timeout_s=10), repeats))
    late = await timed_async(lambda: runtime.call("bash", {"command": "sleep 1"}, timeout_s=10), 3, 0)
    bash["sleep 1, beyond it"] = median_ms(late) - 1000
    for name, code in CELLS.items():
        ipython[name] = median_ms(
            await timed_async(lambda c=code: runtime.call("ipython", {"code": c}, timeout_s=20), repeats)
        )
    return bash, ipython


async def starts(factory: RuntimeFactory, kind: RuntimeKind, repeats: int) -> dict[str, str]:
    firsts, stops = [], []
    for _ in range(repeats):
        runtime = factory.create(SandboxSpec(kind=kind))
        started = time.perf_counter()
        await runtime.start()
        await runtime.call("bash", {"command": "echo hi"}, timeout_s=10)
        firsts.append(time.perf_counter() - started)
        started = time.perf_counter()
        await runtime.stop()
        stops.append(time.perf_counter() - started)

    async def one() -> None:
        async with factory.create(SandboxSpec(kind=kind)) as runtime:
            await runtime.call("bash", {"command": "echo hi"}, timeout_s=60)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(64):
            group.create_task(one())
    together = time.perf_counter() - started
    return {
        "start to first answer, median": f"{median_ms(firsts):.0f} ms",
        "stop, median": f"{median_ms(stops):.0f} ms",
        "64 at once, start to stop": f"{together:.1f} s ({64 / together * 60:.0f} a minute)",
    }


def tree_pss_mb(runtime: Runtime) -> float:
    pid = runtime.describe().pid
    total = 0
    for below in [pid, *descendants(pid)] if pid else []:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{below}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


async def memory(factory: RuntimeFactory, kind: RuntimeKind) -> dict[str, str]:
    async with contextlib.AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(factory.create(SandboxSpec(kind=kind))) for _ in range(8)]
        for box in boxes:
            await box.call("bash", {"command": "echo hi"}, timeout_s=10)
        shell = statistics.mean(map(tree_pss_mb, boxes))
        for box in boxes:
            await box.call("ipython", {"code": "1"}, timeout_s=30)
        both = statistics.mean(map(tree_pss_mb, boxes))
    return {"memory, idle, shell only (8 alive, PSS)": f"{shell:.1f} MB", "the same with IPython": f"{both:.1f} MB"}


def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    made = Table(title=title)
    for column in columns:
        made.add_column(column)
    for row in rows:
        made.add_row(*row)
    return made


def ratio_rows(ours: dict[str, dict[str, float]], floor: dict[str, float]) -> list[list[str]]:
    rows = []
    for name in next(iter(ours.values())):
        row = [name, f"{floor[name]:.3f}" if name in floor else ""]
        for values in ours.values():
            against = f" ({values[name] / floor[name]:.1f}x)" if name in floor else ""
            row.append(f"{values[name]:.3f}{against}")
        rows.append(row)
    return rows


async def main(repeats: int) -> None:
    console = Console(width=120)
    bash: dict[str, dict[str, float]] = {}
    ipython: dict[str, dict[str, float]] = {}
    facts: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "100kB").write_bytes(b"x" * 99 + b"\n" + b"y" * 99_900)
        floor, cell_floor = bash_floor(folder, repeats), ipython_floor(repeats)
        state = Path(folder) / "state"
        for kind in ("local", "bubblewrap"):
            factory = RuntimeFactory(RuntimeConfig(), PathsConfig(state=state, images=state))
            try:
                await factory.prepare([kind])
                async with factory.create(SandboxSpec(kind=kind)) as runtime:
                    bash[kind], ipython[kind] = await tools(runtime, repeats)
                facts[kind] = {**await starts(factory, kind, max(5, repeats // 20)), **await memory(factory, kind)}
            except ConfigError as error:
                console.print(f"{kind} left out: {error}")
            finally:
                await factory.stop()
    kinds = list(bash)
    load = os.getloadavg()[0]
    head = ["median ms", "floor", *kinds]
    title = f"bash, {repeats} runs (load {load:.1f}); floor: bare terminal"
    console.print(table(title, head, ratio_rows(bash, floor)))
    title = "IPython; floor: the bare shell in this process"
    console.print(table(title, head, ratio_rows(ipython, cell_floor)))
    rows = [[name, *(facts[kind][name] for kind in kinds)] for name in facts[kinds[0]]]
    console.print(table("sandboxes", ["", *kinds], rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the runs")
    asyncio.run(main(30 if parser.parse_args().quick else 300))
