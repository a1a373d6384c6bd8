"""The server as a process: where it says it is, and how it goes."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .conftest import ServerProcess, StartProcess, alive, until

JOBS = 16


@asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as opened:
        yield opened


async def post(http: aiohttp.ClientSession, url: str, body: Any = None) -> dict[str, Any]:
    async with http.post(url, json=body) as response:
        answer: dict[str, Any] = await response.json()
        return answer


async def get(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.get(url) as response:
        answer: dict[str, Any] = await response.json()
        return answer


async def read_stream(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(url) as response:
        return (await response.read()).decode()


async def in_run(http: aiohttp.ClientSession, address: str, count: int = JOBS) -> None:
    async with asyncio.timeout(60):
        while (await get(http, address + "/status"))["active_run"] != count:
            await asyncio.sleep(0.02)


async def pids_of(http: aiohttp.ClientSession, address: str, event: str) -> list[int]:
    """What each job emitted when it had started its process."""
    pids = []
    for number in range(JOBS):
        async with http.get(f"{address}/jobs/j{number}/events") as response:
            async for line in response.content:
                fields = json.loads(line[6:]) if line.startswith(b"data: ") else {}
                if fields.get("event") == event:
                    pids.append(fields["pid"])
                    break
    return pids


def submit_all(http: aiohttp.ClientSession, address: str, task: str) -> list[asyncio.Task[dict[str, Any]]]:
    bodies = [{"task": task, "instance": {}, "job_id": f"j{number}"} for number in range(JOBS)]
    return [asyncio.create_task(post(http, address + "/process", body)) for body in bodies]


@pytest.mark.parametrize(("task", "event"), [("child", "child"), ("sandboxed", "sandbox")])
async def test_sigterm_answers_every_waiter_and_leaves_nothing(
    server_process: StartProcess, tmp_path: Path, task: str, event: str
) -> None:
    """L-02."""
    file = tmp_path / "address"
    process = server_process(
        server={"port": 0, "address_file": str(file)},
        pipeline={"run": {"workers": JOBS}},
        runtime={"kind": "bubblewrap"},
    )
    assert file.read_text().strip() == process.address
    soft, hard = resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE)
    assert soft == hard
    async with session() as http:
        waiting = submit_all(http, process.address, task)
        await in_run(http, process.address)
        started = await pids_of(http, process.address, event)
        assert len(started) == JOBS
        below = [pid for root in started for pid in descendants(root)]
        polling = asyncio.create_task(get(http, process.address + "/jobs/j0?wait_s=300"))
        following = asyncio.create_task(read_stream(http, process.address + "/jobs/j1/events"))
        await get(http, process.address + "/status")
        began = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        results = await asyncio.gather(*waiting)
        assert {result["status"] for result in results} == {"cancelled"}
        assert (await polling)["status"] == "cancelled"
        assert "event: cancelled" in await following
        assert await process.ended(10) == 0
        assert time.monotonic() - began < 10
    assert not any(map(alive, below))
    assert not file.exists()
    assert "Traceback" not in process.log.read_text()


async def test_stop_with_exit_ends_the_process(server_process: StartProcess) -> None:
    process = server_process()
    async with session() as http:
        waiting = asyncio.create_task(post(http, process.address + "/process", {"task": "slow", "instance": {}}))
        await in_run(http, process.address, 1)
        assert (await post(http, process.address + "/stop", {"exit": True}))["status"] == "stopping"
        assert (await waiting)["status"] == "cancelled"
        assert await process.ended(10) == 0


async def test_exit_may_wait_for_the_jobs(server_process: StartProcess) -> None:
    process = server_process()
    async with session() as http:
        body = {"task": "slow", "instance": {"seconds": 0.5}}
        waiting = asyncio.create_task(post(http, process.address + "/process", body))
        await in_run(http, process.address, 1)
        await post(http, process.address + "/stop", {"exit": True, "drain": True})
        assert (await waiting)["status"] == "completed"
        assert await process.ended(10) == 0


async def test_signal_cuts_a_drain_short(server_process: StartProcess) -> None:
    process = server_process()
    async with session() as http:
        waiting = asyncio.create_task(post(http, process.address + "/process", {"task": "slow", "instance": {}}))
        await in_run(http, process.address, 1)
        await post(http, process.address + "/stop", {"exit": True, "drain": True})
        process.process.send_signal(signal.SIGINT)
        assert (await waiting)["status"] == "cancelled"
        assert await process.ended(10) == 0


async def test_second_signal_does_not_wait_for_teardown(server_process: StartProcess) -> None:
    process = server_process()
    async with session() as http:
        waiting = asyncio.create_task(post(http, process.address + "/process", {"task": "stubborn", "instance": {}}))
        await in_run(http, process.address, 1)
        process.process.send_signal(signal.SIGTERM)
        assert (await waiting)["status"] == "cancelled"
        began = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended(10) == 1
        assert time.monotonic() - began < 6


async def test_process_ends_in_time_though_a_handler_holds_the_loop(server_process: StartProcess) -> None:
    process = server_process(server={"port": 0, "shutdown_s": 1.5})
    async with session() as http:
        stuck = asyncio.create_task(post(http, process.address + "/process", {"task": "stuck", "instance": {}}))
        await until(lambda: "holds the event loop" in process.log.read_text() or _is_stuck(process), 20)
        began = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended(10) == 1
        assert time.monotonic() - began < 4
        with pytest.raises(aiohttp.ClientError):
            await stuck


def _is_stuck(process: ServerProcess) -> bool:
    host, port = process.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=2) as probe:
        probe.settimeout(0.5)
        probe.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        try:
            return not probe.recv(1)
        except TimeoutError:
            return True


async def test_slow_reader_does_not_keep_the_process(server_process: StartProcess) -> None:
    process = server_process(server={"port": 0, "shutdown_s": 6})
    host, port = process.address.removeprefix("http://").split(":")
    raw = json.dumps({"task": "talk", "instance": {"tokens": 300_000}}).encode()
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    head = f"POST /process HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    await writer.drain()
    await reader.readline()
    process.process.send_signal(signal.SIGTERM)
    assert await process.ended(10) == 0
    writer.close()


async def test_sigkill_leaves_no_sandbox(server_process: StartProcess) -> None:
    process = server_process(runtime={"kind": "bubblewrap"}, pipeline={"run": {"workers": JOBS}})
    async with session() as http:
        waiting = submit_all(http, process.address, "sandboxed")
        await in_run(http, process.address)
        sandboxes = await pids_of(http, process.address, "sandbox")
        assert len(sandboxes) == JOBS
        below = [pid for sandbox in sandboxes for pid in descendants(sandbox)]
        assert len(below) > JOBS
        process.process.kill()
        await until(lambda: not any(map(alive, below)), 10)
        for ended in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(ended, aiohttp.ClientError)


def descendants(pid: int) -> list[int]:
    """The process and everything below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [below for child in (task / "children").read_text().split() for below in descendants(int(child))]
    return found


def test_taken_port_is_exit_code_two_and_says_what_helps(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = [f"server.port={port}", "runtime=local", "environment=[]", f"paths.state={tmp_path}"]
        run = subprocess.run(
            [sys.executable, "-m", "prorl_gym", *arguments],
            capture_output=True, text=True, timeout=60, check=False, env={**os.environ},
        )  # fmt: skip
    assert run.returncode == 2
    assert f"server.port={port} is in use" in run.stderr
    assert "Traceback" not in run.stderr
