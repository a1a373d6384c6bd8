"""The paper's load: 256 rollouts of 30 bash calls each, in bubblewrap, all at once, through the served service.

`python tests/benchmarks/bench_load.py [--scale 1.0] [--latency 0.5] [--quick]`. Service, scripted model and client are
processes of their own. The model takes its time, as a real one does: else the first rollouts end before the last begin.
Every rollout must complete with its 30 calls answered, and nothing may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from prorl_gym.client import RolloutClient
from prorl_gym.config.models import ProrlConfig
from prorl_gym.server.serve import serve
from prorl_gym.testing.tiny_model import make_tiny_model
from prorl_gym.toolserver.children import descendants
from prorl_gym.types import JobResult

ROOT = Path(__file__).parents[2]
ROLLOUTS, CALLS = 256, 30
START_TIMEOUT_S, STOP_TIMEOUT_S, LOAD_TIMEOUT_S = 120, 60, 1800
SAMPLE_EVERY_S = 1.0
TEARDOWN_S = 10.0
LATENCY_S = 0.5
WORLD = """
from prorl_gym.resources.base import ResourcesServer, Verdict

class World(ResourcesServer):
    async def verify(self, session_id, row, outcome):
        return Verdict(1.0, resolved=True)
"""


def script(calls: int, latency_s: float) -> dict[str, object]:
    """A rollout's turns: each call proves that the shell is the one of the calls before."""
    command = "n=$((n+1)); echo call $n; ls / > /dev/null"
    body = json.dumps({"name": "bash", "arguments": {"command": command}})
    texts = [*[f"<tool_call>\n{body}\n</tool_call>"] * calls, "Done."]
    return {"replies": [{"text": text, "delay_s": latency_s} for text in texts]}


def config(folder: Path, rollouts: int, calls: int) -> ProrlConfig:
    """One environment with bash, and room for all rollouts at once."""
    world = folder / "root" / "resources_servers" / "world"
    world.mkdir(parents=True, exist_ok=True)
    (world / "app.py").write_text(WORLD)
    environment = {
        "name": "world_agent",
        "agent_type": "tool_calling",
        "agent": {"tools": ["bash"], "max_turns": calls + 1},
        "resources_type": "world",
        "resources_name": "world",
        "resources": {},
    }
    return ProrlConfig.model_validate(
        {
            "environments": [environment],
            "pipeline": {"run": {"workers": rollouts}},
            "policy": {"model": str(folder / "model")},
            "runtime": {"kind": "bubblewrap", "start_timeout_s": 600},
            "server": {"port": 0, "address_file": str(folder / "address")},
            "logging": {"level": "WARNING"},
            "paths": {"state": str(folder / "state"), "images": str(folder / "images")},
            "roots": [str(folder / "root"), str(ROOT)],
        }
    )


@contextmanager
def process(command: list[str], address_file: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server: its address and process; terminated at the end."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not (address_file.exists() and address_file.read_text()):
                if running.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[1:3]} did not start")
                time.sleep(0.05)
            yield address_file.read_text().strip(), running
        finally:
            running.terminate()
            running.wait(STOP_TIMEOUT_S)


def kilobytes(pid: int, file: str, field: str) -> int:
    """One line of a process's /proc file; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


class Footprint:
    """The most that a service and its sandboxes took."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sandboxes_mb = 0.0
        self.processes = 0
        self.in_run = 0

    @property
    def service_mb(self) -> float:
        """Of the service alone, by the kernel's own record."""
        return kilobytes(self.pid, "status", "VmHWM") / 1024

    async def watch(self, client: RolloutClient) -> None:
        """Look at it again and again, until cancelled."""
        while True:
            self.in_run = max(self.in_run, (await client.status()).active_run)
            await asyncio.to_thread(self._look)
            await asyncio.sleep(SAMPLE_EVERY_S)

    def _look(self) -> None:
        below = descendants(self.pid)
        self.processes = max(self.processes, len(below))
        memory = sum(kilobytes(pid, "smaps_rollup", "Pss") for pid in below) / 1024
        self.sandboxes_mb = max(self.sandboxes_mb, memory)


def cpu_s(pid: int) -> float:
    """CPU that a process has used, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def complete(result: JobResult, calls: int) -> bool:
    """Whether every call of it was answered by its own shell."""
    answers = [message for message in result.messages if message.role == "tool"]
    numbered = all(f"call {number}" in str(answer.content) for number, answer in enumerate(answers, 1))
    return result.status.value == "completed" and result.reward == 1.0 and len(answers) == calls and numbered


async def until_gone(state: Path) -> int:
    """How many sandboxes are recorded or have a folder, once there are none or a last one has had its time."""
    deadline = time.monotonic() + TEARDOWN_S
    while left := sum(len(list((state / name).iterdir())) for name in ("records", "sandboxes")):
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    return left


async def load(
    address: str, llm: str, pid: int, rollouts: int, calls: int, folder: Path
) -> tuple[list[list[str]], bool]:
    """Roll all out at once; the figures, and whether all went well."""
    footprint = Footprint(pid)
    async with RolloutClient(address) as client, asyncio.timeout(LOAD_TIMEOUT_S):
        await client.add_llm_server(llm)
        first = await client.process({"question": "Warm up."}, task="world")
        if not complete(first, calls):
            raise RuntimeError(f"the first rollout went wrong: {first.status} {first.error}")
        watching = asyncio.create_task(footprint.watch(client))
        cpu, began = cpu_s(pid), time.perf_counter()
        took: list[float] = []

        async def one(number: int) -> JobResult:
            started = time.perf_counter()
            result = await client.process({"question": f"Number {number}."}, task="world")
            took.append(time.perf_counter() - started)
            return result

        results = await asyncio.gather(*(one(number) for number in range(rollouts)))
        elapsed, used = time.perf_counter() - began, cpu_s(pid) - cpu
        watching.cancel()
        await asyncio.wait([watching])
        status = await client.status()
        done = sum(complete(result, calls) for result in results)
        left = await until_gone(folder / "state") + len(status.leftovers)
        actions = rollouts * calls
    return [
        ["complete", f"{done} of {rollouts}"],
        ["sandboxes left at the end", str(left)],
        ["time", f"{elapsed:.1f} s"],
        ["in RUN at once, at most", str(footprint.in_run)],
        ["actions (model call + bash call)", f"{actions / elapsed:.0f} a second"],
        ["rollout, submit to result", f"median {statistics.median(took):.1f} s, last {max(took):.1f} s"],
        ["CPU of the service process", f"{1e3 * used / actions:.2f} ms an action ({used / elapsed:.2f} cores)"],
        ["memory of the service (peak RSS)", f"{footprint.service_mb:.0f} MB"],
        ["memory of all below it (peak PSS)", f"{footprint.sandboxes_mb:.0f} MB, {footprint.processes} processes"],
    ], done == rollouts and left == 0


def main() -> int:
    """Serve, load, print; or be the service."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of rollouts")
    parser.add_argument("--quick", action="store_true", help="an eighth of the rollouts")
    parser.add_argument("--latency", type=float, default=LATENCY_S, help="of the model, seconds a call")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rollouts = max(1, round(ROLLOUTS * (options.scale / 8 if options.quick else options.scale)))
    if options.serve:
        return serve(config(options.serve, rollouts, CALLS))
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # else the sandboxes' users may not pass, and the service keeps its state elsewhere
        make_tiny_model(folder / "model", max_model_len=32768)
        (folder / "script.json").write_text(json.dumps(script(CALLS, options.latency)))
        engine_at = folder / "engine"
        engine = [sys.executable, "-m", "prorl_gym.testing.scripted_llm", "--script", str(folder / "script.json")]
        engine += ["--address-file", str(engine_at), "--model", str(folder / "model")]
        service = [sys.executable, __file__, "--serve", name, "--scale", str(rollouts / ROLLOUTS)]
        with process(engine, engine_at) as (llm, _), process(service, folder / "address") as (address, running):
            rows, well = uvloop.run(load(address, llm, running.pid, rollouts, CALLS, folder))
        rows.append(["exit status of the service", str(running.returncode)])
    title = (
        f"{rollouts} rollouts of {CALLS} bash calls in bubblewrap, model of {options.latency:g} s (load {before:.1f})"
    )
    table = Table("", "", title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
    return 0 if well and running.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
