"""The lock between builders: one inside at a time, also after owners that died without a word."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from prorl_gym.runtimes.images.build_lock import BuildLock, Owner

HOLD = """
import asyncio, sys
from pathlib import Path
from prorl_gym.runtimes.images.build_lock import BuildLock
async def main():
    async with BuildLock(Path(sys.argv[1]), poll_s=0.02):
        print("held", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
asyncio.run(main())
"""
COUNT = """
import asyncio, os, sys
from pathlib import Path
from prorl_gym.runtimes.images.build_lock import BuildLock
lock, inside = Path(sys.argv[1]), Path(sys.argv[2])
async def main():
    for _ in range(5):
        async with BuildLock(lock, poll_s=0.01):
            inside.mkdir()  # fails when somebody else is inside
            await asyncio.sleep(0.01)
            inside.rmdir()
asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks/box"


def leave(path: Path, owner: Owner) -> None:
    """A lock as its owner left it."""
    path.mkdir(parents=True)
    (path / "owner.json").write_text(json.dumps(asdict(owner)))


def elsewhere() -> Owner:
    return replace(Owner.here(), host="node7", kernel="another boot pid:[1]")


async def test_processes_take_turns(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COUNT, str(path), str(tmp_path / "inside")]
    processes = [await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE) for _ in range(4)]
    for process in processes:
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, errors.decode()
    assert list(path.parent.iterdir()) == []


async def test_a_killed_owner_on_this_host_is_noticed_at_once(path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), BuildLock(path, poll_s=0.02):
                pass
        assert [entry.name for entry in path.parent.iterdir()] == ["box"]  # a waiter that gave up left nothing
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        async with asyncio.timeout(10), BuildLock(path, stale_s=600, poll_s=0.02):
            pass
    assert list(path.parent.iterdir()) == []


async def test_a_reused_pid_is_not_the_owner(path: Path) -> None:
    me = Owner.here()
    assert me.start_time is not None
    leave(path, replace(me, start_time=me.start_time - 1))
    async with asyncio.timeout(10), BuildLock(path, stale_s=600, poll_s=0.02):
        pass


async def test_another_host_is_dead_when_its_heartbeat_stops(path: Path) -> None:
    leave(path, elsewhere())
    waited: list[Owner] = []
    lock = BuildLock(path, stale_s=1.0, poll_s=0.02, on_wait=waited.append)
    entering = asyncio.create_task(lock.__aenter__())
    for _ in range(30):
        os.utime(path / "owner.json")
        await asyncio.sleep(0.05)  # the other host's heartbeat, 1.5 times as long as its owner may be silent
    assert not entering.done()
    assert [owner.host for owner in waited] == ["node7"]
    began = time.monotonic()
    async with asyncio.timeout(10):
        await entering
    assert time.monotonic() - began > 0.6
    await lock.__aexit__(None, None, None)
    assert list(path.parent.iterdir()) == []


async def test_of_many_that_find_an_owner_dead_one_is_inside_at_a_time(path: Path) -> None:
    leave(path, elsewhere())
    inside = most = entered = 0

    async def take() -> None:
        nonlocal inside, most, entered
        async with BuildLock(path, stale_s=0.2, heartbeat_s=0.05, poll_s=0.01):
            inside += 1
            most = max(most, inside)
            entered += 1
            await asyncio.sleep(0.02)
            inside -= 1

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for _ in range(12):
            group.create_task(take())
    assert (most, entered) == (1, 12)
    assert list(path.parent.iterdir()) == []


async def test_who_lost_the_lock_leaves_it_to_its_new_owner(path: Path) -> None:
    first = BuildLock(path, heartbeat_s=600)
    await first.__aenter__()
    async with BuildLock(path, stale_s=0.1, poll_s=0.02):
        await first.__aexit__(None, None, None)
        assert path.exists()
    assert not path.exists()


async def test_a_long_build_keeps_its_lock(path: Path) -> None:
    async with BuildLock(path, heartbeat_s=0.05):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0), BuildLock(path, stale_s=1.0, poll_s=0.02):
                pass


async def test_a_record_that_a_crash_emptied_does_not_block_for_ever(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "owner.json").touch()
    async with asyncio.timeout(10), BuildLock(path, stale_s=0.1, poll_s=0.02):
        pass


async def test_a_folder_that_cannot_be_written_is_an_error_not_a_wait(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        async with asyncio.timeout(5), BuildLock(tmp_path / "file/locks/box"):
            pass
