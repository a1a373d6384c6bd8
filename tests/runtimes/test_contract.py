"""What every kind of sandbox promises."""

import asyncio
import contextlib
import json
import os
import signal
import time
import uuid
from pathlib import Path

import pytest

from prorl_gym.config.models import PathsConfig, RuntimeConfig
from prorl_gym.errors import ConfigError, RuntimeStartError, SandboxError
from prorl_gym.runtimes.base import Limits
from prorl_gym.runtimes.factory import RuntimeFactory

from .sandboxes import processes_with, spawned

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def bash(runtime, command, timeout_s=10.0):
    return await runtime.call("bash", {"command": command}, timeout_s=timeout_s)


async def test_runs_commands_and_says_how_they_ended(runtime):
    assert (await bash(runtime, "printf 42")).text == "42"
    failed = await bash(runtime, "printf y; (exit 7)")
    assert failed.exit_code == 7
    assert failed.error
    assert failed.text == "y\n[exit code 7]"


async def test_nothing_of_the_hosts_environment_is_inside(runtime, monkeypatch):
    monkeypatch.setenv("PRORL_TEST_SECRET", "s3cret")
    text = (await bash(runtime, "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'")).text
    assert "PRORL_TEST_SECRET" not in text


async def test_the_agent_has_no_privileges(factory, runtime):
    if factory.spec().fakeroot:
        pytest.skip("it is root of its own namespace: test_apptainer.py says what it cannot do")
    reply = await bash(runtime, "id -u; cat /etc/shadow; grep CapEff /proc/self/status")
    uid, *rest = reply.text.splitlines()
    assert uid != "0"
    assert any("Permission denied" in line or "No such file" in line for line in rest)
    assert "CapEff:\t0000000000000000" in rest


async def test_calls_overlap(runtime):
    slow = asyncio.create_task(bash(runtime, "sleep 0.6; echo slow"))
    quick = await runtime.call("ipython", {"code": "print('quick')"}, timeout_s=20)
    assert quick.text == "quick\n"
    await runtime.call("file_editor", {"command": "view", "path": "."}, timeout_s=5)
    assert (await slow).text == "slow\n"


async def test_a_cancelled_call_is_interrupted_and_the_shell_stays(runtime, eventually):
    marker = f"77{uuid.uuid4().int % 10**6}"
    call = asyncio.create_task(bash(runtime, f"sleep {marker}", timeout_s=60))
    await eventually(lambda: processes_with(f"sleep\0{marker}"))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await bash(runtime, "echo ok")).text == "ok\n"
    await eventually(lambda: not processes_with(f"sleep\0{marker}"))


async def test_a_call_cancelled_as_it_begins_is_over_when_the_next_one_starts(runtime):
    for number in range(20):
        call = asyncio.create_task(bash(runtime, "yes", timeout_s=60))
        await asyncio.sleep(0)  # it has been sent
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await bash(runtime, f"echo {number}", timeout_s=5)).text.endswith(f"{number}\n")


async def test_files_go_in_and_out(runtime, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/sh\necho ran\n")
    script.chmod(0o755)
    await runtime.copy_in(script, "deep/er/run.sh")
    assert (await bash(runtime, "./deep/er/run.sh")).text == "ran\n"
    blob = os.urandom(20 << 20)
    await runtime.copy_in(blob, "blob")
    assert await runtime.copy_out("blob", max_bytes=len(blob)) == blob
    with pytest.raises(SandboxError, match="more than the 100"):
        await runtime.copy_out("blob", max_bytes=100)
    with pytest.raises(FileNotFoundError):
        await runtime.copy_out("absent", max_bytes=100)
    with pytest.raises(SandboxError, match="not a regular file"):
        await runtime.copy_out("deep", max_bytes=100)
    await bash(runtime, "mkfifo pipe")
    with pytest.raises(SandboxError):
        await runtime.copy_out("pipe", max_bytes=100)
    with pytest.raises(SandboxError):
        await runtime.copy_in(b"x", "pipe")
    await bash(runtime, "rm blob")


@pytest.mark.parametrize("path", ["nul\0", "half\ud800", "x" * 300, "a/" * 3000 + "b", "", "/"])
async def test_a_path_that_cannot_be_is_an_error_and_files_still_go(runtime, path):
    with pytest.raises((SandboxError, FileNotFoundError)):
        await runtime.copy_out(path, max_bytes=100)
    with pytest.raises(SandboxError):
        await runtime.copy_in(b"x", path)
    reply = await runtime.call("file_editor", {"command": "view", "path": path or "nul\0"}, timeout_s=5)
    assert reply.error or path == "/"
    await runtime.copy_in(b"still", "fine")
    assert await runtime.copy_out("fine", max_bytes=100) == b"still"


async def test_links_never_lead_the_host_astray(runtime, tmp_path):
    """The agent's links point at host files that only the service may read or write."""
    secret, target = tmp_path / "secret", tmp_path / "target"
    secret.write_text("s3cret")
    target.write_text("untouched")
    tmp_path.chmod(0o700)
    await bash(runtime, f"ln -s {secret} out; ln -s {target} in; ln -s {tmp_path} folder")
    for path in ("out", "folder/secret"):
        with pytest.raises((SandboxError, FileNotFoundError)):
            await runtime.copy_out(path, max_bytes=100)
    for path in ("in", "folder/target"):
        with contextlib.suppress(SandboxError):
            await runtime.copy_in(b"overwritten", path)
    assert target.read_text() == "untouched"


async def test_stop_ends_what_the_agent_left_running(factory, eventually):
    marker = f"66{uuid.uuid4().int % 10**6}"
    runtime = factory.create(factory.spec())
    async with runtime:
        folder = Path(runtime._record.folder)
        await bash(
            runtime, f"sleep {marker} & setsid sleep {marker} & (trap '' TERM HUP INT; sleep {marker}) & echo on"
        )
        cell = f"import subprocess; subprocess.Popen(['sleep', '{marker}'], start_new_session=True).pid"
        await runtime.call("ipython", {"code": cell}, timeout_s=20)
        await eventually(lambda: len(processes_with(f"sleep\0{marker}")) == 4)
    assert not processes_with(f"sleep\0{marker}")
    assert not folder.exists()
    await runtime.stop()
    with pytest.raises(SandboxError, match="not running"):
        await bash(runtime, "echo hi")


async def test_a_dead_sandbox_is_a_sandbox_error_at_once(factory, eventually):
    before = spawned(factory)
    async with factory.create(factory.spec()) as runtime:
        call = asyncio.create_task(bash(runtime, "sleep 50", timeout_s=60))
        await bash_started(runtime)
        os.kill(runtime.describe().pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(SandboxError, match="gone"):
            await call
        with pytest.raises(SandboxError, match="gone"):
            await bash(runtime, "echo hi")
        assert time.monotonic() - started < 5
    await eventually(lambda: spawned(factory) == before)


async def bash_started(runtime):
    await runtime.call("file_editor", {"command": "view", "path": "."}, timeout_s=5)


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.05, 0.1])
async def test_a_start_that_is_cancelled_leaves_nothing(factory, after_s, eventually):
    before = spawned(factory)
    runtime = factory.create(factory.spec())
    start = asyncio.create_task(runtime.start())
    await asyncio.sleep(after_s)  # the moment is the input here
    start.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await start
    await runtime.stop()
    await eventually(lambda: spawned(factory) == before)
    if runtime._record is not None:
        assert not Path(runtime._record.folder).exists()
    assert not factory.leftovers()


async def test_a_start_that_takes_too_long_says_so(factory):
    with pytest.raises(RuntimeStartError, match="did not answer within"):
        async with factory.create(factory.spec(start_timeout_s=0.001)):
            pass


async def test_stop_is_not_cut_short_by_a_cancel(factory):
    runtime = factory.create(factory.spec())
    await runtime.start()
    folder = Path(runtime._record.folder)
    stop = asyncio.create_task(runtime.stop())
    await asyncio.sleep(0)
    stop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stop
    assert not folder.exists()


async def test_many_at_once(factory):
    """Sixteen together, each with its own user, folder and answer."""

    async def one(number: int) -> str:
        async with factory.create(factory.spec()) as runtime:
            await bash(runtime, f"echo {number} > mine")
            return (await bash(runtime, "cat mine; ls | wc -l")).text

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(16)]
    assert [task.result() for task in tasks] == [f"{number}\n1\n" for number in range(16)]
    assert not factory.leftovers()


async def test_descriptors_do_not_pile_up(factory):
    async def cycle() -> None:
        async with factory.create(factory.spec()) as runtime:
            await bash(runtime, "sleep 5", timeout_s=0.05)
            call = asyncio.create_task(bash(runtime, "sleep 5"))
            await asyncio.sleep(0)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call

    await cycle()
    before, started = len(os.listdir("/proc/self/fd")), spawned(factory)
    for _ in range(6):
        await cycle()
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert spawned(factory) == started


async def test_output_is_bounded_head_and_tail(factory):
    limits = Limits(output_bytes=2000)
    async with factory.create(factory.spec(limits=limits)) as runtime:
        reply = await bash(
            runtime, "echo FIRST; head -c 30000000 /dev/zero | tr '\\0' x; echo; echo LAST", timeout_s=30
        )
        assert reply.text.startswith("FIRST\n")
        assert reply.text.endswith("LAST\n")
        assert "bytes left out" in reply.text
        assert len(reply.text) < 2200


async def test_a_file_may_not_grow_beyond_its_limit(factory):
    async with factory.create(factory.spec(limits=Limits(file_bytes=1 << 20))) as runtime:
        reply = await bash(runtime, "head -c 3000000 /dev/zero > big; stat -c %s big")
        assert reply.text.splitlines()[-1] == str(1 << 20)
        edit = {"command": "create", "path": "big2", "file_text": "x" * (2 << 20)}
        assert "too large" in (await runtime.call("file_editor", edit, timeout_s=5)).text


async def test_an_undeletable_folder_is_a_leftover_and_is_tried_again(factory, monkeypatch):
    """L-18: one job's folder cannot be removed; it is reported, others go on, a later try clears it."""
    runtime = factory.create(factory.spec(job_id="sticky"))
    await runtime.start()
    folder = Path(runtime._record.folder)
    mount_like = monkeypatch.context()
    with mount_like as patch:
        patch.setattr(
            "prorl_gym.runtimes.host.shutil.rmtree", lambda path, **kw: kw["onerror"](None, path, (0, "busy", 0))
        )
        with pytest.raises(SandboxError, match="tried again"):
            await runtime.stop()
        assert [left["job_id"] for left in factory.leftovers()] == ["sticky"]
    async with factory.create(factory.spec()) as other:
        assert (await bash(other, "echo fine")).text == "fine\n"
    assert await factory.sweep() == 1
    assert factory.leftovers() == []
    assert not folder.exists()


async def test_leftovers_of_a_dead_service_are_swept(factory, eventually):
    """Its record names an owner that is gone; a live owner's sandbox is left alone."""
    dead = factory.create(factory.spec())
    await dead.start()
    alive = factory.create(factory.spec())
    await alive.start()
    path = factory._host.records / f"{dead._record.sandbox_id}.json"
    fields = json.loads(path.read_text())
    fields["owner"] = [fields["owner"][0], 1]  # the pid was given to another process
    path.write_text(json.dumps(fields))
    await factory.sweep()
    assert not path.exists()
    await eventually(lambda: dead._process.exited.is_set())
    assert not Path(dead._record.folder).exists()
    assert (await bash(alive, "echo here")).text == "here\n"
    await alive.stop()
    await dead.stop()


async def test_a_dead_spawner_takes_its_sandboxes_along_and_is_replaced(factory, eventually):
    runtime = factory.create(factory.spec())
    await runtime.start()
    pid = runtime.describe().pid
    os.kill(factory._host.launcher._process.pid, signal.SIGKILL)
    await eventually(lambda: not Path(f"/proc/{pid}").exists())
    with pytest.raises(SandboxError, match="gone"):
        await bash(runtime, "echo hi")
    await runtime.stop()
    async with factory.create(factory.spec()) as other:
        assert (await bash(other, "echo fine")).text == "fine\n"
    assert not factory.leftovers()


async def test_records_lie_beside_the_folders_that_they_tell_of(factory, runtime):
    """A service whose own paths.state is closed to others keeps both elsewhere, where the next one finds them."""
    record = runtime._record
    assert factory._host.records.parent == Path(record.folder).parents[1]
    assert (factory._host.records / f"{record.sandbox_id}.json").exists()


async def test_a_state_folder_that_cannot_be_written_is_a_config_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    factory = RuntimeFactory(RuntimeConfig(), PathsConfig(state=blocked / "state", images=tmp_path))
    try:
        with pytest.raises(ConfigError, match=r"paths\.state"):
            await factory.prepare(["local"])
    finally:
        await factory.stop()
