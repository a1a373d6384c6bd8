"""The sandbox's tools side by side with what other frameworks use, in one run, and against the machine's floors.

`python tests/benchmarks/bench_peers.py [--quick]`. Ours run in bubblewrap, from the host into the sandbox and back; the
peers run on the host itself, in environments of their own that are installed when they are missing. A peer that cannot
be installed is a row that says why.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench_tools import BareTerminal, ipython_shell, timed, timed_async
from peer_environments import PeerMissing, peer
from rich.console import Console
from rich.table import Table
from socket_kinds import round_trips

from prorl_gym.config.models import PathsConfig, RuntimeConfig
from prorl_gym.errors import ConfigError
from prorl_gym.runtimes.base import SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory

COMMANDS = {
    "echo hi": ("echo hi", "hi"),
    "one fork (/bin/true)": ("/bin/true", ""),
    "100 kB": ("cat {folder}/100kB", "yyy"),
    "1 s sleep, beyond 1 s": ("sleep 1", ""),
}
CELLS = {"1+1": ("1+1", "2"), "print 100 kB": ("print('x' * 100_000)", "xxx")}
BASH_TARGETS_MS = {"echo hi": 0.5, "one fork (/bin/true)": 2.0, "100 kB": 5.0, "1 s sleep, beyond 1 s": 5.0}
CELL_TARGETS_MS = {"1+1": 1.0}
BASH_PEERS = {
    "OpenHands tools, tmux": ("openhands", "openhands_terminal.py", "tmux"),
    "OpenHands tools, subprocess": ("openhands", "openhands_terminal.py", "subprocess"),
    "SWE-ReX local": ("swerex", "swerex_local.py"),
}
CELL_PEERS = {
    "kernel over ZMQ": ("jupyter", "zmq_kernel.py"),
    "Kernel Gateway, quick ACKs": ("jupyter", "kernel_gateway.py", "quick"),
    "Kernel Gateway, as it comes": ("jupyter", "kernel_gateway.py", "plain"),
}
TARGET_RATIOS = {
    "OpenHands tools, tmux": 200,
    "OpenHands tools, subprocess": 40,
    "SWE-ReX local": 200,
    "kernel over ZMQ": 6,
    "Kernel Gateway, quick ACKs": 8,
    "Kernel Gateway, as it comes": 40,
}
"""How many times faster ours shall be, at the first row of its table."""
LINES = b"x" * 99 + b"\n" + b"y" * 99_900

Samples = dict[str, list[float]]
Measure = Callable[[str, str, int], list[float]]


def measured(cases: Mapping[str, tuple[str, str]], measure: Measure, folder: str, repeats: int) -> Samples:
    """Seconds of each case, without the time that it sleeps by itself."""
    samples = {}
    for name, (command, expect) in cases.items():
        sleeps = name.startswith("1 s")
        took = measure(command.format(folder=folder), expect, max(3, repeats // 20) if sleeps else repeats)
        samples[name] = [seconds - 1 for seconds in took] if sleeps else took
    return samples


def floors(folder: str, repeats: int) -> tuple[Samples, Samples]:
    """Bash on a bare terminal; IPython's shell called in this process."""
    terminal, cell = BareTerminal(), ipython_shell()
    try:
        bash = measured(COMMANDS, lambda c, _, n: timed(lambda: terminal.run(c), n, 3), folder, repeats)
    finally:
        terminal.close()
    return bash, measured(CELLS, lambda c, _, n: timed(lambda: cell(c), n, 20), folder, repeats)


async def ours(state: Path, repeats: int) -> tuple[Samples, Samples]:
    """Both tools in one bubblewrap sandbox."""
    factory = RuntimeFactory(RuntimeConfig(), PathsConfig(state=state, images=state))
    try:
        await factory.prepare(["bubblewrap"])
        async with factory.create(SandboxSpec("bubblewrap")) as runtime:
            await runtime.copy_in(LINES, "100kB")
            folder = (await runtime.call("bash", {"command": "printf %s $PWD"}, timeout_s=5)).text

            async def run(cases: Mapping[str, tuple[str, str]], tool: str, key: str, warm_up: int) -> Samples:
                samples = {}
                for name, (command, _) in cases.items():
                    sleeps = name.startswith("1 s")
                    call = partial(runtime.call, tool, {key: command.format(folder=folder)}, timeout_s=30)
                    took = await timed_async(call, max(3, repeats // 20) if sleeps else repeats, warm_up)
                    samples[name] = [seconds - 1 for seconds in took] if sleeps else took
                return samples

            return await run(COMMANDS, "bash", "command", 3), await run(CELLS, "ipython", "code", 20)
    finally:
        await factory.stop()


def peers(
    which: Mapping[str, tuple[str, ...]], cases: Mapping[str, tuple[str, str]], folder: str, repeats: int
) -> dict[str, Samples | str]:
    """What each measured, or why there is nothing."""
    found: dict[str, Samples | str] = {}
    for name, (environment, script, *arguments) in which.items():
        try:
            with peer(environment, script, *arguments, folder) as running:
                found[name] = measured(cases, running.measure, folder, repeats)
        except PeerMissing as error:
            found[name] = str(error)
    return found


def ms(seconds: float) -> str:
    """Milliseconds, with digits that mean something."""
    value = 1000 * seconds
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def comparison(
    title: str, floor: Samples, own: Samples, others: dict[str, Samples | str], targets: dict[str, float]
) -> Table:
    """One line per case and contender."""
    table = Table(title=title)
    for column in ("", "who", "median ms", "p95", "min", ": ours", ": floor", "target"):
        table.add_column(column, justify="left" if column in ("", "who") else "right", no_wrap=column != "who")
    for number, case in enumerate(own):
        base, bottom = statistics.median(own[case]), statistics.median(floor[case])
        contenders = {"ours, in bubblewrap": own, "floor": floor, **others}
        for name, samples in contenders.items():
            if isinstance(samples, str):
                if number == 0:
                    table.add_row(case, f"{name}: {samples}", *["-"] * 5)
                continue
            took = sorted(samples[case])
            median = statistics.median(took)
            target = ""
            if samples is own and case in targets:
                target = f"≤ {targets[case]:g} ms"
            elif number == 0 and name in TARGET_RATIOS:
                target = f"≥ {TARGET_RATIOS[name]} times ours"
            p95 = took[min(len(took) - 1, int(0.95 * len(took)))]
            ratios = (f"{median / base:.2f}" if name == "floor" else f"{median / base:.1f}", f"{median / bottom:.1f}")
            table.add_row(case, name, ms(median), ms(p95), ms(took[0]), *ratios, target)
        table.add_section()
    return table


def sockets(repeats: int) -> Table:
    """Round trips of our frames."""
    table = Table(title="Unix socket against TCP loopback: our frames, echoed by a process of its own, interleaved")
    for column in ("body", "Unix: median ms", "p95", "TCP: median ms", "p95", "TCP : Unix"):
        table.add_column(column, justify="right")
    for size, label in ((100, "100 B"), (10_000, "10 kB"), (1_000_000, "1 MB")):
        unix, tcp = asyncio.run(round_trips(size, repeats if size < 1_000_000 else max(20, repeats // 5)))
        cells = []
        for took in (unix, tcp):
            cells += [ms(statistics.median(took)), ms(sorted(took)[int(0.95 * len(took))])]
        table.add_row(label, *cells, f"{statistics.median(tcp) / statistics.median(unix):.2f}")
    return table


def main(repeats: int) -> None:
    """Measure all, then print."""
    console = Console(width=120)
    console.print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs at the start, {repeats} runs each")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "100kB").write_bytes(LINES)
        try:
            own_bash, own_cells = asyncio.run(ours(Path(folder) / "state", repeats))
        except ConfigError as error:
            console.print(f"left out, no bubblewrap here: {error}")
            return
        bash_floor, cell_floor = floors(folder, repeats)
        slow = max(10, repeats // 6)
        bash_peers = peers(BASH_PEERS, COMMANDS, folder, slow)
        cell_peers = peers(CELL_PEERS, CELLS, folder, slow)
    console.print(comparison("bash", bash_floor, own_bash, bash_peers, BASH_TARGETS_MS))
    console.print(comparison("IPython", cell_floor, own_cells, cell_peers, CELL_TARGETS_MS))
    console.print(sockets(10 * repeats))
    console.print(f"load average {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fifth of the runs")
    main(60 if parser.parse_args().quick else 300)
