"""A real server on loopback, in the test's own loop or as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prorl_gym.config.models import PathsConfig, ProrlConfig, RuntimeConfig
from prorl_gym.server.http_server import HttpServer
from prorl_gym.server.listener import bind
from prorl_gym.server.service import Service

from . import handlers as test_handlers

MODULE = test_handlers.__name__
IMPORT_ROOT = Path(test_handlers.__file__).parents[MODULE.count(".")]
HANDLERS = {
    name: f"{MODULE}:{name_of}"
    for name, name_of in {
        "noop": "NoOp",
        "held": "Held",
        "slow": "Slow",
        "talk": "Talk",
        "odd": "Odd",
        "stuck": "Stuck",
        "child": "WithChild",
        "stubborn": "Stubborn",
        "sandboxed": "Sandboxed",
    }.items()
}


def make_config(folder: Path, **changes: Any) -> ProrlConfig:
    fields = {
        "handlers": HANDLERS,
        "runtime": RuntimeConfig(kind="local"),
        "paths": PathsConfig(state=folder / "state", images=folder / "images"),
        "server": {"port": 0},
        **changes,
    }
    return ProrlConfig.model_validate(fields)


class Client:
    """Requests against one server, in the fewest words."""

    def __init__(self, session: aiohttp.ClientSession, service: Service, http: HttpServer) -> None:
        self.session = session
        self.service = service
        self.http = http
        self.address = http.address

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and parsed body; `body` is bytes, or sent as JSON."""
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        async with self.session.request(
            method, self.address + path, data=None if sent is None else io.BytesIO(sent), headers=headers, **options
        ) as response:
            return response.status, json.loads(await response.read())

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        return await self.ask("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        return await self.ask("POST", path, body, **options)

    async def process(self, task: str, **fields: Any) -> dict[str, Any]:
        status, result = await self.post("/process", {"task": task, "instance": {}, **fields})
        assert status == 200, result
        return result

    @property
    def requests_under_way(self) -> int:
        return len(self.http._uvicorn.server_state.tasks)

    def handler(self, task: str) -> Any:
        return self.service.handlers._handlers[task]


Serving = Callable[..., contextlib.AbstractAsyncContextManager[Client]]


@contextlib.asynccontextmanager
async def serving_in(folder: Path, **changes: Any) -> AsyncIterator[Client]:
    config = make_config(folder, **changes)
    service = Service(config)
    with contextlib.closing(bind(config.server, has_token=service.token is not None)) as listener:
        await service.start()
        http = HttpServer(service, listener)
        try:
            await http.start()
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                yield Client(session, service, http)
        finally:
            await service.stop()
            await http.stop()


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    return functools.partial(serving_in, tmp_path)


@pytest.fixture
async def client(serving: Serving) -> AsyncIterator[Client]:
    async with serving() as client:
        yield client


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


class ServerProcess:
    """`serve(config)` in a process of its own."""

    def __init__(self, config: ProrlConfig, folder: Path, environment: dict[str, str] | None = None) -> None:
        file = folder / "config.json"
        file.write_text(config.model_dump_json())
        self.log = folder / "log.txt"
        code = (
            "import json, pathlib, sys, prorl_gym.logs; from prorl_gym.config.models import ProrlConfig; "
            "from prorl_gym.server.serve import serve; "
            "config = ProrlConfig.model_validate(json.loads(pathlib.Path(sys.argv[1]).read_text())); "
            "prorl_gym.logs.configure_logging(config.logging); sys.exit(serve(config))"
        )
        paths = [str(IMPORT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error::ResourceWarning", "-c", code, str(file)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
            )
        self.address = ""

    def wait_until_up(self) -> None:
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, self.log.read_text()

    async def ended(self, timeout_s: float) -> int:
        """Its exit code."""
        await until(lambda: self.process.poll() is not None, timeout_s)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


StartProcess = Callable[..., ServerProcess]


@pytest.fixture
def server_process(tmp_path: Path) -> Iterator[StartProcess]:
    started: list[ServerProcess] = []

    def start(**changes: Any) -> ServerProcess:
        environment = changes.pop("environment", None)
        started.append(ServerProcess(make_config(tmp_path, **changes), tmp_path, environment))
        started[-1].wait_until_up()
        return started[-1]

    yield start
    for process in started:
        process.close()


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
