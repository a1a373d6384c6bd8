"""What bubblewrap adds to the contract: isolation, and a host that cannot run it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import pytest_asyncio

from prorl_gym.config.models import PathsConfig, RuntimeConfig
from prorl_gym.errors import ConfigError, RuntimeStartError, SandboxError
from prorl_gym.runtimes.base import Limits, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory
from prorl_gym.toolserver.children import descendants

from .sandboxes import prepared_factory, processes_with, spawned

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes(state):
    async with prepared_factory(state, "bubblewrap") as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(boxes):
    async with boxes.create(SandboxSpec(kind="bubblewrap")) as made:
        yield made


@pytest.fixture
def bash(box):
    async def run(command, timeout_s=10.0):
        return await box.call("bash", {"command": command}, timeout_s=timeout_s)

    return run


async def test_only_loopback_and_it_works(bash):
    assert (await bash("ls /sys/class/net 2>/dev/null; tail -n +3 /proc/net/dev | cut -d: -f1")).text.split() == ["lo"]
    serve = (
        "python3 -c \"import socket as s; at=('127.0.0.1', 8000); a=s.create_server(at); b=s.create_connection(at);"
        "c=a.accept()[0]; b.send(b'x'); print(c.recv(1))\""
    )
    assert (await bash(serve)).text == "b'x'\n"
    assert (await bash("python3 -c \"import socket; socket.create_connection(('1.1.1.1', 80), 2)\"")).exit_code == 1


async def test_the_hosts_files_are_out_of_sight(bash, box):
    text = (
        await bash("cat /etc/passwd; ls -A /home /root /home/agent; ls -d /work /var/lib/dpkg /sys/kernel 2>&1")
    ).text
    assert "agent:x:1000" in text
    assert text.count("No such file") >= 2
    assert (await bash("touch /usr/x /etc/x /x /dev/x /opt/prorl/x 2>&1 | grep -c Read-only")).text == "5\n"
    assert (await bash("cd /workspace && touch a && touch ~/b /tmp/c /var/tmp/d /dev/shm/e && echo ok")).text == "ok\n"


async def test_other_processes_are_out_of_sight(bash):
    text = (await bash("cat /proc/1/comm; ls /proc | grep -c '^[0-9]'")).text
    assert text.splitlines()[0] == "python3"
    assert int(text.splitlines()[1]) < 12


async def test_the_tool_server_cannot_be_touched(bash):
    """It is PID 1 and not dumpable: no signal, no ptrace, no memory, no descriptor of it."""
    attack = (
        "cat /proc/1/cmdline >/dev/null && (cat /proc/1/mem; cat /proc/1/environ; ls /proc/1/fd) 2>&1 | grep -c denied"
    )
    assert int((await bash(attack)).text) >= 3
    if (await bash("readlink /proc/self/ns/pid")).text.strip() == str(Path("/proc/self/ns/pid").readlink()):
        pytest.fail("the sandbox shares the host's PID namespace")
    assert (await bash("id -u")).text == "1000\n"
    await bash("kill -9 1; kill -INT 1; kill -TERM 1; kill -CHLD 1; echo survived")
    assert (await bash("echo on")).text == "on\n"
    await bash("sleep 100 & kill -9 -1; true")
    await bash("bash -c 'kill -9 -1; kill -9 0'")
    assert (await bash("echo still here")).text.endswith("still here\n")
    assert int((await bash("ls /proc | grep -c '^[0-9]'")).text) < 12


async def test_each_sandbox_has_a_host_user_of_its_own(boxes, box):
    if os.geteuid() != 0:
        pytest.skip("the service is not root: its sandboxes run under its own user")
    async with boxes.create(SandboxSpec(kind="bubblewrap")) as other:
        users = [Path(f"/proc/{one.describe().pid}").stat().st_uid for one in (box, other)]
    assert len({0, *users}) == 3


async def test_a_disk_in_memory_holds_its_size(boxes, tmp_path):
    spec = SandboxSpec(kind="bubblewrap", disk="memory", limits=Limits(disk_bytes=50 << 20))
    async with boxes.create(spec) as runtime:

        async def bash(command):
            return (await runtime.call("bash", {"command": command}, timeout_s=20)).text

        places = "/tmp/a /var/tmp/a ~/a /workspace/a"
        assert "disk" not in runtime.describe().unenforced
        assert await bash(f"pwd; touch {places} && ls {places} | wc -l") == "/workspace\n4\n"
        full = await bash(
            "head -c 40M /dev/zero > ~/a; head -c 40M /dev/zero > /workspace/a; stat -c %s ~/a /workspace/a"
        )
        assert "No space left" in full
        assert sum(int(line) for line in full.splitlines() if line.isdigit()) <= 50 << 20
        await bash("rm ~/a")
        await runtime.copy_in(b"fits", "b")
        assert await runtime.copy_out("b", max_bytes=9) == b"fits"
        refused = await bash("touch /usr/x /etc/x /dev/x /opt/x /opt/prorl/x; mv /opt /o; mv /usr /u; echo end")
        assert refused.count("Read-only") == 5
        assert refused.count("busy") == 2
        assert not list(Path(runtime._record.folder).glob("*/*"))


async def test_host_network_is_the_hosts(boxes):
    async with boxes.create(SandboxSpec(kind="bubblewrap", network="host")) as runtime:
        reply = await runtime.call("bash", {"command": "readlink /proc/self/ns/net"}, timeout_s=5)
        assert reply.text.strip() == str(Path("/proc/self/ns/net").readlink())


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.05, 0.3])
async def test_a_killed_bwrap_takes_everything_along(boxes, after_s, eventually):
    """X-02: its pid is killed at some moment of its life; nothing that it started stays."""
    marker, before = f"88{uuid.uuid4().int % 10**6}", spawned(boxes)
    runtime = boxes.create(SandboxSpec(kind="bubblewrap"))
    start = asyncio.create_task(runtime.start())
    await eventually(lambda: runtime._process is not None)
    call = None
    if after_s > 0.1:
        await start
        call = asyncio.create_task(runtime.call("bash", {"command": f"sleep {marker} & sleep {marker}"}, timeout_s=60))
    await asyncio.sleep(after_s)  # the moment is the input here
    os.kill(runtime._process.pid, signal.SIGKILL)
    results = await asyncio.gather(start, *([call] if call else []), return_exceptions=True)
    if call is not None:
        assert isinstance(results[-1], SandboxError)
    await eventually(lambda: spawned(boxes) == before and not processes_with(f"sleep\0{marker}"))
    await runtime.stop()


async def test_an_image_folder_is_the_root(boxes, tmp_path):
    """An image without Python: the tools bring their own."""
    image = tmp_path / "image"
    for name in ("bin", "lib", "lib64", "usr/share/mine", "opt/theirs", "etc", "proc"):
        (image / name).mkdir(parents=True)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    libraries = {"/lib64/ld-linux-x86-64.so.2"}
    for program in ("bash", "cat", "ls"):
        listed = subprocess.run(["ldd", f"/bin/{program}"], capture_output=True, text=True, check=True).stdout
        libraries |= {word for word in listed.split() if word.startswith("/")}
        (image / "bin" / program).write_bytes(Path(f"/bin/{program}").read_bytes())
        (image / "bin" / program).chmod(0o755)
    for library in libraries:
        target = image / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(library).read_bytes())
        target.chmod(0o755)
    (image / "etc/os-release").write_text("ID=mine\n")
    async with boxes.create(SandboxSpec(kind="bubblewrap", image=str(image))) as runtime:
        reply = await runtime.call("bash", {"command": "cat /etc/os-release; ls /opt; python3"}, timeout_s=5)
        assert reply.text.split()[:3] == ["ID=mine", "prorl", "theirs"]
        assert "not found" in reply.text
        assert (await runtime.call("ipython", {"code": "6*7"}, timeout_s=20)).text == "42\n"
    with pytest.raises(RuntimeStartError, match="not a folder"):
        async with boxes.create(SandboxSpec(kind="bubblewrap", image=str(tmp_path / "absent"))):
            pass


async def test_an_image_without_bash_gets_one(boxes, tmp_path):
    image = tmp_path / "image"
    (image / "etc").mkdir(parents=True)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    async with boxes.create(SandboxSpec(kind="bubblewrap", image=str(image))) as runtime:
        reply = await runtime.call("bash", {"command": "echo $BASH; echo *; ls"}, timeout_s=5)
        assert reply.text.startswith("/opt/prorl/bin/bash\n")
        assert "ls: command not found" in reply.text


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        (
            "bwrap: No permissions to create new namespace, likely because the kernel does not allow it",
            "unprivileged_userns",
        ),
        ("bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted", "network namespace"),
    ],
)
async def test_a_host_that_refuses_says_why(state, tmp_path, monkeypatch, message, advice):
    """X-07."""
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    fake.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    factory = RuntimeFactory(RuntimeConfig(), PathsConfig(state=state, images=state))
    try:
        with pytest.raises(ConfigError) as caught:
            await factory.prepare(["bubblewrap"])
        assert message in str(caught.value)
        assert advice in str(caught.value)
        with pytest.raises(RuntimeStartError, match="not been prepared"):
            factory.create(SandboxSpec(kind="bubblewrap"))
    finally:
        await factory.stop()


BOMB = """python3 -c "
import os, time
for n in range(200):
    try:
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
    except BlockingIOError:
        print('refused after', n)
        break
"
"""


async def test_a_fork_bomb_is_contained(boxes):
    """Inside its own PID namespace and under a user of its own only."""
    spec = SandboxSpec(kind="bubblewrap", limits=Limits(processes=40))
    async with boxes.create(spec) as runtime:
        reply = await runtime.call(
            "bash", {"command": "readlink /proc/self/ns/pid; id -u; cat /proc/1/comm"}, timeout_s=5
        )
        assert "python3" in reply.text
        assert Path("/proc/self/ns/pid").readlink().name not in reply.text
        reply = await runtime.call("bash", {"command": BOMB}, timeout_s=20)
        assert 5 < int(reply.text.split("refused after ")[1]) < 40
        assert (await runtime.call("bash", {"command": "echo ok"}, timeout_s=10)).text == "ok\n"


SERVICE = """
import asyncio, sys
from prorl_gym.config.models import PathsConfig, RuntimeConfig
from prorl_gym.runtimes.base import Limits, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory

async def main():
    kind, state, marker = sys.argv[1:]
    factory = RuntimeFactory(RuntimeConfig(), PathsConfig(state=state, images=state))
    await factory.prepare([kind])
    for _ in range(3):
        runtime = factory.create(SandboxSpec(kind=kind))
        await runtime.start()
        command = f"setsid sleep {marker} & (trap '' HUP TERM; sleep {marker}) & sleep 0.1"
        await runtime.call("bash", {"command": command}, timeout_s=9)
    print("up", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # ends with the test, whatever becomes of it

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["bubblewrap", "local"])
async def test_nothing_survives_a_sigkill_of_the_service(boxes, state, kind, eventually):
    marker = f"55{uuid.uuid4().int % 10**6}"
    service = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE, kind, str(state), marker, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert await asyncio.wait_for(service.stdout.readline(), 30) == b"up\n"
    assert len(processes_with(f"sleep\0{marker}")) == 6
    below = descendants(service.pid)
    assert len(below) > 12
    service.kill()
    await service.wait()
    await eventually(lambda: not processes_with(f"sleep\0{marker}"))
    await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
    await boxes.sweep()
    owners = [json.loads(path.read_text())["owner"][0] for path in boxes._host.records.glob("*.json")]
    assert service.pid not in owners
