"""What the service costs a job over HTTP, against two floors of the same run: bare FastAPI, and bare ASGI.

Run it on an idle machine: `python tests/benchmarks/bench_service.py`. Handlers do nothing, so what is measured is HTTP,
JSON, three stages and the bookkeeping of a job. Servers and client are processes of their own.
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
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from prorl_gym.config.models import ProrlConfig
from prorl_gym.handlers.base import AgentHandler, EvalOutput, Job, Prepared, RunOutput
from prorl_gym.server.listener import address_of, bind
from prorl_gym.server.serve import serve
from prorl_gym.types import StopReason

CONCURRENCIES = (1, 64, 512)
HELD = 2000
START_TIMEOUT_S = 60
BODY = {
    "task": "noop",
    "instance": {"question": "What is 6 times 7?", "expected_answer": "42"},
    "include": ["segments"],
}


class NoOp(AgentHandler):
    """Three stages that do nothing."""

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        return RunOutput(stop_reason=StopReason.ANSWERED)

    async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
        return EvalOutput(reward=1.0)


class Held(NoOp):
    """Stays in RUN."""

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        await asyncio.sleep(3600)
        return RunOutput(stop_reason=StopReason.ANSWERED)


class Row(BaseModel):
    """The floor's body."""

    task: str
    instance: dict[str, Any]
    include: list[str]


def fastapi_floor() -> FastAPI:
    """FastAPI with one typed route."""
    app = FastAPI()

    @app.post("/process")
    async def process(row: Row) -> dict[str, Any]:
        return {"task": row.task, "reward": 1.0}

    return app


async def asgi_floor(scope: Any, receive: Any, send: Any) -> None:
    """No framework at all."""
    message = await receive()
    row = json.loads(message["body"])
    body = json.dumps({"task": row["task"], "reward": 1.0}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def config(folder: Path) -> ProrlConfig:
    """The service without environments, with room for every job at once."""
    workers = {"workers": 4 * HELD}
    return ProrlConfig.model_validate(
        {
            "handlers": {"noop": f"{Path(__file__).stem}:NoOp", "held": f"{Path(__file__).stem}:Held"},
            "pipeline": {"init": workers, "run": workers, "eval": workers},
            "server": {"port": 0, "address_file": str(folder / "address")},
            "runtime": {"kind": "local"},
            "paths": {"state": str(folder / "state"), "images": str(folder / "images")},
        }
    )


def serve_floor(app: Any, folder: Path) -> None:
    """A floor, on the same kind of socket, loop and parser."""
    listener = bind(config(folder).server, has_token=False)
    (folder / "address").write_text(address_of(listener))
    settings = uvicorn.Config(
        app, http="httptools", loop="none", ws="none", lifespan="off", log_level="warning", access_log=False,
        proxy_headers=False, server_header=False, date_header=False,
    )  # fmt: skip
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(uvicorn.Server(settings).serve(sockets=[listener]))


@contextmanager
def server(kind: str) -> Iterator[tuple[str, int]]:
    """A server process: its address and pid."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        with subprocess.Popen(
            [sys.executable, __file__, "--serve", kind, folder], stdout=subprocess.DEVNULL, env=environment
        ) as process:
            address = Path(folder) / "address"
            deadline = time.monotonic() + START_TIMEOUT_S
            while not (address.exists() and address.read_text()):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{kind} did not start")
                time.sleep(0.05)
            time.sleep(0.3)
            yield address.read_text().strip(), process.pid
            process.terminate()
            process.wait(30)


class Connection:
    """One kept-alive connection, as cheap as Python makes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: str) -> Connection:
        """Connect."""
        host, port = address.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def ask(self, method: str, path: str, body: Any = None) -> bytes:
        """One request; the body of its answer."""
        raw = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n"
        )
        self._writer.write(head.encode() + b"\r\n" + raw)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        if b" 20" not in answer[:13]:
            raise RuntimeError((await self._reader.readexactly(length)).decode())
        return await self._reader.readexactly(length)

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


def cpu_s(pid: int) -> float:
    """CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def load(address: str, pid: int, concurrency: int, requests: int) -> tuple[float, float, float]:
    """Requests a second, median milliseconds, and the server's CPU microseconds a request."""
    latencies: list[float] = []
    connections = [await Connection.open(address) for _ in range(concurrency)]

    async def work(connection: Connection, count: int) -> None:
        for _ in range(count):
            began = time.perf_counter()
            await connection.ask("POST", "/process", BODY)
            latencies.append(time.perf_counter() - began)

    await asyncio.gather(*(work(connection, 3) for connection in connections))
    latencies.clear()
    cpu, began = cpu_s(pid), time.perf_counter()
    await asyncio.gather(*(work(connection, requests // concurrency) for connection in connections))
    elapsed = time.perf_counter() - began
    used = cpu_s(pid) - cpu
    for connection in connections:
        connection.close()
    return len(latencies) / elapsed, 1e3 * statistics.median(latencies), 1e6 * used / len(latencies)


async def hold(address: str, pid: int) -> dict[str, float]:
    """Keep jobs in flight, each with a client that waits for it, and look at the service meanwhile."""
    control = await Connection.open(address)
    before = rss_mb(pid)
    connections = [await Connection.open(address) for _ in range(HELD)]
    bodies = ({**BODY, "task": "held", "job_id": f"held-{number}"} for number in range(HELD))
    waiting = [
        asyncio.create_task(connection.ask("POST", "/process", body))
        for connection, body in zip(connections, bodies, strict=True)
    ]
    while json.loads(await control.ask("GET", "/status"))["active_run"] < HELD:
        await asyncio.sleep(0.05)
    latencies = []
    for _ in range(1000):
        began = time.perf_counter()
        await control.ask("GET", "/status")
        latencies.append(time.perf_counter() - began)
    held = rss_mb(pid) - before
    began = time.perf_counter()
    await control.ask("POST", "/cancel", {"prefix": "held-"})
    await asyncio.gather(*waiting)
    cancelled = time.perf_counter() - began
    for connection in (control, *connections):
        connection.close()
    p50, p99 = statistics.median(latencies), statistics.quantiles(latencies, n=100)[98]
    return {"extra RSS MB": held, "/status p50 ms": 1e3 * p50, "/status p99 ms": 1e3 * p99, "cancel all s": cancelled}


def main() -> None:
    """Print the tables, or serve one of the servers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "FOLDER"))
    parser.add_argument("--requests", type=int, default=8192)
    parser.add_argument("--quick", action="store_true", help="an eighth of the requests")
    options = parser.parse_args()
    requests = options.requests // 8 if options.quick else options.requests
    if options.serve:
        kind, folder = options.serve[0], Path(options.serve[1])
        if kind == "service":
            sys.exit(serve(config(folder)))
        serve_floor(fastapi_floor() if kind == "fastapi" else asgi_floor, folder)
        return
    console = Console()
    measured: dict[str, dict[int, tuple[float, float, float]]] = {}
    held: dict[str, float] = {}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for kind in ("asgi", "fastapi", "service"):
            with server(kind) as (address, pid):
                measured[kind] = {
                    concurrency: runner.run(
                        load(address, pid, concurrency, requests if concurrency > 1 else requests // 4)
                    )
                    for concurrency in CONCURRENCIES
                }
                if kind == "service":
                    held = runner.run(hold(address, pid))
    table = Table(title="POST /process with a handler that does nothing")
    for column in ("concurrent", "server", "jobs/s", "p50 ms", "CPU µs/job", "CPU : ASGI", "CPU : FastAPI"):
        table.add_column(column, justify="right")
    for concurrency in CONCURRENCIES:
        for kind, figures in measured.items():
            rate, p50, cpu = figures[concurrency]
            ratios = [cpu / max(1e-9, measured[floor][concurrency][2]) for floor in ("asgi", "fastapi")]
            row = (str(concurrency), kind, f"{rate:,.0f}", f"{p50:.2f}", f"{cpu:.0f}")
            table.add_row(*row, *(f"{ratio:.1f}" for ratio in ratios))
    console.print(table)
    console.print(f"{HELD} jobs in flight: " + ", ".join(f"{name} {value:.1f}" for name, value in held.items()))


if __name__ == "__main__":
    main()
