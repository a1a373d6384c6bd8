"""Grader processes: they answer, they are bounded, and nothing of them is left."""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prorl_gym.errors import ConfigError, EvaluationError
from prorl_gym.resources.confine import Confinement
from prorl_gym.resources.graders import GraderPool, WorkerLost
from prorl_gym.runtimes.bubblewrap import bubblewrap_program

GRADER = """
import os, socket, time

def grade(request):
    what = request["do"]
    if what == "echo":
        print("noise on stdout")
        return {"text": request["text"], "pid": os.getpid()}
    if what == "raise":
        raise KeyError("no such thing")
    if what == "die":
        os._exit(3)
    if what == "spin":
        while True:
            pass
    if what == "sleep":
        open(request["mark"], "w").close()
        time.sleep(60)
    if what == "hoard":
        return {"size": len("x" * 10**11)}
    if what == "nonsense":
        return ["no", "object"]
    if what == "look":
        return {"exists": [os.path.exists(p) for p in request["paths"]], "uid": os.getuid(), "env": sorted(os.environ)}
    if what == "dial":
        try:
            socket.create_connection(("127.0.0.1", request["port"]), timeout=2).close()
        except OSError as error:
            return {"reached": False, "error": str(error)}
        return {"reached": True}
"""

CONFINED = Confinement(bubblewrap_program(Path(tempfile.gettempdir(), "prorl_gym-tests")))
CONFINEMENT = [pytest.param(None, id="local"), pytest.param(CONFINED, id="bubblewrap")]


@pytest.fixture
def grader(tmp_path: Path) -> Path:
    folder = tmp_path / "grader"
    folder.mkdir()
    path = folder / "grader.py"
    path.write_text(GRADER)
    return path


@asynccontextmanager
async def pool_of(grader: Path, confine: Callable | None = CONFINED, **options: object) -> AsyncIterator[GraderPool]:
    pool = GraderPool(grader, confine, **{"workers": 1, "timeout_s": 5.0, **options})
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


def children() -> set[int]:
    """Our own child processes, zombies included."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.mark.parametrize("confine", CONFINEMENT)
async def test_a_worker_answers_and_stays(grader: Path, confine: Callable | None) -> None:
    before = children()
    async with pool_of(grader, confine) as pool:
        first = await pool.grade({"do": "echo", "text": "a"})
        second = await pool.grade({"do": "echo", "text": "\ud800 ü " + "z" * 10_000_000})
        assert first["text"] == "a"
        assert len(second["text"]) == 10_000_004
        assert first["pid"] == second["pid"]
    assert children() == before


@pytest.mark.parametrize("confine", CONFINEMENT)
async def test_a_worker_that_is_lost_is_replaced_and_the_cause_is_told(grader: Path, confine: Callable | None) -> None:
    before = children()
    async with pool_of(grader, confine) as pool:
        began = time.monotonic()
        with pytest.raises(WorkerLost) as late:
            await pool.grade({"do": "spin"}, timeout_s=0.3)
        assert late.value.cause == "timeout"
        assert time.monotonic() - began < 2
        assert (await pool.grade({"do": "echo", "text": "again"}))["text"] == "again"
        with pytest.raises(WorkerLost) as full:
            await pool.grade({"do": "hoard"})
        assert full.value.cause == "memory"
        with pytest.raises(WorkerLost) as dead:
            await pool.grade({"do": "die"})
        assert dead.value.cause == "crash"
        assert (await pool.grade({"do": "echo", "text": "still"}))["text"] == "still"
    assert children() == before


@pytest.mark.parametrize("what", ["raise", "nonsense"])
async def test_a_broken_grader_is_an_evaluation_error_and_the_next_request_works(grader: Path, what: str) -> None:
    async with pool_of(grader, None) as pool:
        with pytest.raises(EvaluationError) as broken:
            await pool.grade({"do": what})
        assert not isinstance(broken.value, WorkerLost)
        assert (await pool.grade({"do": "echo", "text": "ok"}))["text"] == "ok"


async def test_the_loop_goes_on_while_graders_spin(grader: Path) -> None:
    async with pool_of(grader, workers=2) as pool:
        spinning = [asyncio.create_task(pool.grade({"do": "spin"}, timeout_s=0.7)) for _ in range(2)]
        longest, last = 0.0, time.monotonic()
        while not all(task.done() for task in spinning):
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        for task in spinning:
            with pytest.raises(WorkerLost):
                await task
    assert longest < 0.5


async def test_cancel_kills_the_worker(grader: Path, tmp_path: Path) -> None:
    before = children()
    async with pool_of(grader, None) as pool:
        sleeping = asyncio.create_task(pool.grade({"do": "sleep", "mark": str(tmp_path / "asleep")}, timeout_s=30))
        async with asyncio.timeout(10):
            while not (tmp_path / "asleep").exists():
                await asyncio.sleep(0.01)
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        async with asyncio.timeout(5):
            while children() != before:
                await asyncio.sleep(0.01)


async def test_stop_ends_requests_in_flight_and_later_ones_are_refused(grader: Path, tmp_path: Path) -> None:
    async with pool_of(grader, None) as pool:
        sleeping = asyncio.create_task(pool.grade({"do": "sleep", "mark": str(tmp_path / "asleep")}, timeout_s=30))
        async with asyncio.timeout(10):
            while not (tmp_path / "asleep").exists():
                await asyncio.sleep(0.01)
        await pool.stop()
        await pool.stop()
        with pytest.raises(EvaluationError) as ended:
            await sleeping
        assert not isinstance(ended.value, WorkerLost)
        with pytest.raises(EvaluationError, match="stopped"):
            await pool.grade({"do": "echo", "text": "late"})


async def test_inside_there_is_no_network_no_home_and_no_checkout(grader: Path) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    hidden = [
        str(Path(__file__)),
        "/etc/shadow",
        "/etc/passwd",
        str(Path.home() / ".profile"),
        str(grader.parent.parent),
    ]
    async with server, pool_of(grader) as pool:
        assert (await pool.grade({"do": "dial", "port": port}))["reached"] is False
        seen = await pool.grade({"do": "look", "paths": [*hidden[:4], str(grader)]})
    assert seen["exists"] == [False, False, False, False, True]
    assert seen["uid"] == 65534
    assert set(seen["env"]) <= {"HOME", "LANG", "PATH", "PWD", "PYTHONDONTWRITEBYTECODE", "LC_CTYPE"}


@pytest.mark.parametrize("confine", CONFINEMENT)
@pytest.mark.parametrize("code", ["raise ValueError('not today')", "import no_such_module", "grade = None; del grade"])
async def test_a_grader_that_does_not_load_is_a_config_error(grader: Path, confine: Callable | None, code: str) -> None:
    before = children()
    grader.write_text(code)
    pool = GraderPool(grader, confine)
    with pytest.raises(ConfigError, match=r"grader\.py"):
        await pool.start()
    await pool.stop()
    assert children() == before


async def test_a_sandbox_that_does_not_start_says_why(grader: Path) -> None:
    def broken(command, readable):
        return ["sh", "-c", "echo no user namespaces here >&2; exit 1"]

    pool = GraderPool(grader, broken)
    with pytest.raises(ConfigError, match="no user namespaces here"):
        await pool.start()
    await pool.stop()
