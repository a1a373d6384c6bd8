"""What the Apptainer sandboxes promise beyond every sandbox's contract. Cases X-02, X-06, X-07, X-08."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from prorl_gym.config.models import PathsConfig, RuntimeConfig
from prorl_gym.errors import ConfigError, RuntimeStartError, SandboxError
from prorl_gym.runtimes.apptainer import ApptainerRuntime
from prorl_gym.runtimes.base import Limits, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory
from prorl_gym.toolserver.children import descendants

from .sandboxes import prepared_factory, processes_with, spawned

pytestmark = [pytest.mark.apptainer, pytest.mark.asyncio(loop_scope="module")]
HELPERS = "mnt/session/"  # on the command lines of squashfuse and fuse-overlayfs
MIB = 1 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes(state):
    async with prepared_factory(state, "apptainer") as made:
        yield made


@pytest.fixture(scope="module")
def sif(images):
    return partial(SandboxSpec, kind="apptainer", image=str(images / "base.sif"))


@pytest.fixture(scope="module")
def folder(images):
    return partial(SandboxSpec, kind="apptainer", image=str(images / "base"))


async def bash(runtime, command, timeout_s=20.0):
    return (await runtime.call("bash", {"command": command}, timeout_s=timeout_s)).text


async def test_the_network_is_really_off(boxes, sif):
    async with boxes.create(sif()) as runtime:
        assert (await bash(runtime, "tail -n +3 /proc/net/dev | cut -d: -f1")).split() == ["lo"]
        serve = (
            "python3 -c \"import socket as s; at=('127.0.0.1', 8000); a=s.create_server(at);"
            "b=s.create_connection(at); c=a.accept()[0]; b.send(b'x'); print(c.recv(1))\""
        )
        assert await bash(runtime, serve) == "b'x'\n"
        assert "unreachable" in await bash(runtime, "exec 3<>/dev/tcp/192.0.2.1/80")


async def test_host_network_is_the_hosts(boxes, folder):
    async with boxes.create(folder(network="host")) as runtime:
        own = str(Path("/proc/self/ns/net").readlink())
        assert (await bash(runtime, "readlink /proc/self/ns/net")).strip() == own


@pytest.mark.parametrize("kind", ["sif", "folder"])
@pytest.mark.parametrize("fakeroot", [False, True])
async def test_what_is_written_has_the_configured_size(boxes, request, kind, fakeroot):
    """X-06: one size for all places, more than Apptainer's own 64 MB; beyond it the command fails in words."""
    spec = request.getfixturevalue(kind)(fakeroot=fakeroot, limits=Limits(disk_bytes=300 * MIB))
    async with boxes.create(spec) as runtime:
        assert "disk" not in runtime.describe().unenforced
        assert await bash(runtime, "head -c 100M /dev/zero > /tmp/x; head -c 100M /dev/zero > ~/x && echo ok") == "ok\n"
        reply = await runtime.call("bash", {"command": "head -c 200M /dev/zero > /workspace/x"}, timeout_s=20)
        assert reply.exit_code == 1
        assert "No space left on device" in reply.text
        await bash(runtime, "rm /tmp/x ~/x /workspace/x")
        assert "No space left" in await bash(runtime, "head -c 400M /dev/zero > /dev/shm/x")
        assert await bash(runtime, "rm /dev/shm/x; echo fine | tee /workspace/y") == "fine\n"


async def test_images_stay_as_they_are(boxes, sif, images):
    command = "echo changed > /etc/marker; rm -r /opt; touch /new; cat /etc/marker"
    async with boxes.create(sif(fakeroot=True)) as one, boxes.create(sif(fakeroot=True)) as two:
        assert (await bash(one, command)).endswith("changed\n")
        assert await bash(two, "cat /etc/marker; ls /new 2>&1") == (
            "the image's own\nls: cannot access '/new': No such file or directory\n[exit code 2]"
        )
    assert (images / "base/etc/marker").read_text() == "the image's own\n"


async def test_the_hosts_files_and_names_are_out_of_sight(boxes, sif):
    async with boxes.create(sif()) as runtime:
        text = await bash(
            runtime, f"ls -A /home; hostname; ls -d {Path.cwd()} {Path.home()}/.cache 2>&1; cat /etc/hosts"
        )
        assert text.splitlines()[:2] == ["agent", "sandbox"]
        assert text.count("No such file") + text.count("Permission denied") >= 2
        assert socket.gethostname() not in text
        assert "no\n" == await bash(runtime, "touch /opt/prorl/x 2>/dev/null || echo no")
        assert not [line for line in (await bash(runtime, "env")).splitlines() if "APPTAINER" in line]


@pytest.mark.parametrize("fakeroot", [False, True])
async def test_the_tool_server_cannot_be_touched(boxes, sif, fakeroot):
    """As root of the namespace too: it can neither be signalled, traced nor read, and nothing can be mounted."""
    async with boxes.create(sif(fakeroot=fakeroot)) as runtime:
        for file in ("mem", "environ", "fd/3", "maps"):
            assert "denied" in await bash(runtime, f"cat /proc/1/{file}")
        attack = (
            "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"
            "[c.ptrace(16, 1, 0, 0), c.mount(b'x', b'/mnt', b'tmpfs', 0, None), c.unshare(0x20000),"
            "c.mount(b'none', b'/dev', b'none', 32, b'size=90g'), c.syscall(438, c.syscall(434, 1, 0), 3, 0)]"
        )
        reply = await runtime.call("ipython", {"code": attack}, timeout_s=20)
        assert reply.text == "[-1, -1, -1, -1, -1]\n"
        await bash(runtime, "kill -9 1; kill -INT 1; kill -TERM 1; kill -STOP 1; sleep 100 & kill -9 -1; true")
        await bash(runtime, "bash -c 'kill -9 -1; kill -9 0'")
        assert (await bash(runtime, "echo still here")).endswith("still here\n")
        pid_namespace = (await bash(runtime, "readlink /proc/self/ns/pid")).strip()
        assert pid_namespace != str(Path("/proc/self/ns/pid").readlink())


async def test_each_sandbox_has_a_host_user_of_its_own(boxes, sif):
    if os.geteuid() != 0:
        pytest.skip("the service is not root: its sandboxes run under its own user")
    async with boxes.create(sif()) as one, boxes.create(sif(fakeroot=True)) as two:
        users = set()
        for runtime in (one, two):
            assert "user" not in runtime.describe().unenforced
            pid = runtime.describe().pid
            users |= {Path(f"/proc/{below}").stat().st_uid for below in (pid, *descendants(pid))}
    assert len(users) >= 2
    assert 0 not in users


async def test_the_images_own_environment_is_the_agents(boxes, tmp_path, open_folders):
    image = tmp_path / "image"
    settings = image / ".singularity.d/env/10-docker2singularity.sh"
    settings.parent.mkdir(parents=True)
    settings.write_text('export PATH="/conda/bin:/usr/bin"\nexport CONDA_ENV="test bed"\nexport PAGER=more\n')
    open_folders(tmp_path)
    spec = SandboxSpec(kind="apptainer", image=str(image), env={"MINE": "1"})
    async with boxes.create(spec) as runtime:
        path, others = (await bash(runtime, "echo $PATH; echo $CONDA_ENV $PAGER $MINE")).splitlines()
        assert path.startswith("/conda/bin:/usr/bin")
        assert others == "test bed cat 1"


async def test_an_image_without_anything_has_all_the_tools(boxes, tmp_path, open_folders):
    image = tmp_path / "image"
    image.mkdir()
    open_folders(tmp_path)
    async with boxes.create(SandboxSpec(kind="apptainer", image=str(image))) as runtime:
        assert await bash(runtime, "echo $BASH; cd; echo > a; python3") == (
            "/opt/prorl/bin/bash\nbash: python3: command not found\n[exit code 127]"
        )
        assert (await runtime.call("ipython", {"code": "6*7"}, timeout_s=20)).text == "42\n"
        created = {"command": "create", "path": "a.txt", "file_text": "x"}
        assert not (await runtime.call("file_editor", created, timeout_s=5)).error


async def test_setup_installs_as_root_with_a_network_that_the_agent_has_not(boxes, sif, tmp_path):
    """What the setup left running is gone, with its sockets; what it installed is there."""
    package = tmp_path / "toy"
    (package / "DEBIAN").mkdir(parents=True)
    (package / "DEBIAN/control").write_text(
        "Package: toy\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n"
    )
    (package / "DEBIAN/postinst").write_text("#!/bin/sh\nchown www-data:www-data /usr/bin/toy\n")
    (package / "DEBIAN/postinst").chmod(0o755)
    (package / "usr/bin").mkdir(parents=True)
    (package / "usr/bin/toy").write_text("#!/bin/sh\necho toy works\n")
    (package / "usr/bin/toy").chmod(0o755)
    build = await asyncio.create_subprocess_exec("dpkg-deb", "--build", package, tmp_path / "toy.deb", stdout=-3)
    assert await build.wait() == 0
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    connect = f"exec 3<>/dev/tcp/127.0.0.1/{server.sockets[0].getsockname()[1]} && echo connected"
    async with server, boxes.create(sif(fakeroot=True, setup_network="host")) as runtime:
        await runtime.copy_in(tmp_path / "toy.deb", "toy.deb")
        text = await bash(runtime, f"dpkg --install /workspace/toy.deb; setsid sleep 600 & {connect}")
        assert text.endswith("connected\n")
        await runtime.seal()
        assert await bash(runtime, "toy; stat -c %U /usr/bin/toy; ls /workspace") == "toy works\nwww-data\ntoy.deb\n"
        assert "refused" in await bash(runtime, connect)
        assert (await bash(runtime, "tail -n +3 /proc/net/dev | cut -d: -f1")).split() == ["lo"]
        assert "sleep" not in await bash(runtime, "cat /proc/[0-9]*/comm")
        await runtime.seal()
        assert await bash(runtime, "echo on") == "on\n"


async def test_many_starts_of_one_image_leave_no_mount_and_no_helper(boxes, sif, eventually):
    """X-08: 16 at once, 5 rounds, each with a process that holds its file system busy."""
    before, mounts = spawned(boxes), Path("/proc/self/mountinfo").read_text().count("\n")
    image = sif().image

    async def one() -> str:
        async with boxes.create(sif()) as runtime:
            return await bash(runtime, "cd /usr; sleep 600 & echo up")

    for _ in range(5):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one()) for _ in range(16)]
        assert [task.result() for task in tasks] == ["up\n"] * 16
    await eventually(lambda: spawned(boxes) == before)
    assert not processes_with("sleep\x00600") or os.environ.get("PYTEST_XDIST_WORKER")
    assert not processes_with(image)
    assert Path("/proc/self/mountinfo").read_text().count("\n") == mounts
    assert not boxes.leftovers()


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1, 0.2, 0.6])
async def test_a_killed_starter_takes_everything_along(boxes, sif, after_s, eventually):
    """X-02: file system helpers too."""
    marker, before = f"88{uuid.uuid4().int % 10**6}", spawned(boxes)
    runtime = boxes.create(sif())
    start = asyncio.create_task(runtime.start())
    await eventually(lambda: runtime._process is not None)
    call = None
    if after_s > 0.5:
        await start
        call = asyncio.create_task(runtime.call("bash", {"command": f"sleep {marker} & sleep {marker}"}, timeout_s=60))
        await eventually(lambda: processes_with(f"sleep\0{marker}"))
    else:
        await asyncio.sleep(after_s)  # the moment is the input here
    os.kill(runtime._process.pid, signal.SIGKILL)
    results = await asyncio.gather(start, *([call] if call else []), return_exceptions=True)
    if call is not None:
        assert isinstance(results[-1], SandboxError)
    await eventually(lambda: spawned(boxes) == before and not processes_with(f"sleep\0{marker}"))
    with pytest.raises(SandboxError):
        await bash(runtime, "echo hi")
    await runtime.stop()


async def test_a_killed_spawner_leaves_no_helper(boxes, sif, eventually):
    async with boxes.create(sif()) as runtime:
        pid = runtime.describe().pid
        assert {session(below) for below in descendants(pid)} == {pid}
        tree = [pid, *descendants(pid)]
        assert len(tree) >= 4
        os.kill(boxes._host.launcher._process.pid, signal.SIGKILL)
        await eventually(lambda: not any(alive(each) for each in tree))
    await boxes._host.prepare()


def session(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


SERVICE = """
import asyncio, sys
from prorl_gym.config.models import PathsConfig, RuntimeConfig
from prorl_gym.runtimes.base import SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory

async def main():
    image, state, marker = sys.argv[1:]
    factory = RuntimeFactory(RuntimeConfig(), PathsConfig(state=state, images=state))
    await factory.prepare(["apptainer"])
    for fakeroot in (False, True):
        runtime = factory.create(SandboxSpec(kind="apptainer", image=image, fakeroot=fakeroot))
        await runtime.start()
        command = f"setsid sleep {marker} & (trap '' HUP TERM; sleep {marker}) & sleep 0.1"
        await runtime.call("bash", {"command": command}, timeout_s=9)
    print("up", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_nothing_survives_a_sigkill_of_the_service(boxes, state, sif, eventually):
    marker = f"55{uuid.uuid4().int % 10**6}"
    service = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE, sif().image, str(state), marker, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert await asyncio.wait_for(service.stdout.readline(), 60) == b"up\n"
        below = descendants(service.pid)
        assert len(below) > 10
    finally:
        service.kill()
        await service.wait()
    await eventually(lambda: not any(alive(pid) for pid in below), within_s=10)
    assert not processes_with(f"sleep\0{marker}")
    await boxes.sweep()
    assert not boxes.leftovers()


async def test_nothing_is_written_into_the_home(state, sif, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    async with prepared_factory(state, "apptainer") as factory, factory.create(sif()) as runtime:
        assert await bash(runtime, "echo on") == "on\n"
    assert list(home.iterdir()) == []


async def test_gpus_are_asked_for(boxes, sif):
    """On a host without one the sandbox starts all the same."""
    async with boxes.create(sif(gpu=True)) as runtime:
        assert await bash(runtime, "echo on") == "on\n"
        assert "--nv" in runtime._command(Path(runtime._record.folder), [])


@pytest.mark.parametrize("own_user", [True, False])
async def test_where_apptainer_takes_no_settings_from_us_the_disk_is_not_bounded(boxes, sif, own_user, monkeypatch):
    if own_user and not boxes._apptainer.own_user:
        pytest.skip("the service is not root")
    setup = replace(boxes._apptainer, own_user=own_user, own_settings=False)
    monkeypatch.setattr(boxes, "_apptainer", setup)
    async with boxes.create(sif()) as runtime:
        unenforced = runtime.describe().unenforced
        assert "disk" in unenforced
        assert ("user" in unenforced) == (os.geteuid() == 0 and not own_user)
        assert await bash(runtime, "head -c 100M /dev/zero > /workspace/x; touch ~/a /tmp/b && echo ok") == "ok\n"
    assert not boxes.leftovers()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (None, "needs an image.*docker://python:3.12-slim"),
        ("/absent/image.sif", "/absent/image.sif does not exist.*images list"),
        ("/etc/passwd", "neither a folder nor a .sif"),
    ],
)
async def test_a_missing_image_says_how_to_get_one(boxes, image, message):
    with pytest.raises(RuntimeStartError, match=message):
        async with boxes.create(SandboxSpec(kind="apptainer", image=image)):
            pass


async def test_images_are_found_by_name(boxes, sif, images, tmp_path):
    stored = tmp_path / "image.sif"
    stored.symlink_to(images / "base.sif")
    (tmp_path / "record.json").write_text('{"digest": "4d2"}')

    async def locate(name: str) -> Path:
        if name == "toy/box":
            return stored
        raise ConfigError(f"image {name} is not here; get it with: images pull {name}")

    def named(name: str) -> ApptainerRuntime:
        return ApptainerRuntime(replace(sif(), image=name), boxes._host, boxes._apptainer, locate)

    async with named("toy/box") as runtime:
        assert (runtime.describe().image, runtime.describe().image_digest) == (str(stored), "4d2")
    with pytest.raises(RuntimeStartError, match="images pull other:1"):
        await named("other:1").start()


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("FATAL: could not create user namespace: Operation not permitted", "user.max_user_namespaces"),
        ("FATAL: could not use fakeroot: no mapping entry found in /etc/subuid for user", "usermod --add-subuids"),
        ("FATAL: squashfuse mount: fuse: failed to open /dev/fuse: Permission denied", "mode 0666"),
        ("FATAL: stat /var/lib/apptainer/mnt/session: no such file or directory", "mkdir -p"),
    ],
)
async def test_a_host_that_refuses_says_why(state, tmp_path, monkeypatch, message, advice, open_folders):
    """X-07."""
    fake = tmp_path / "apptainer"
    fake.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 255\n")
    fake.chmod(0o755)
    open_folders(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    factory = RuntimeFactory(RuntimeConfig(), PathsConfig(state=state, images=state))
    try:
        with pytest.raises(ConfigError) as caught:
            await factory.prepare(["apptainer"])
        assert message in str(caught.value)
        assert advice in str(caught.value)
        with pytest.raises(RuntimeStartError, match="not been prepared"):
            factory.create(SandboxSpec(kind="apptainer"))
    finally:
        await factory.stop()


async def test_without_apptainer_the_service_says_how_to_get_it(state, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("apptainer") is None
    factory = RuntimeFactory(RuntimeConfig(), PathsConfig(state=state, images=state))
    try:
        with pytest.raises(ConfigError, match=r"apptainer is not on PATH.*README"):
            await factory.prepare(["apptainer"])
    finally:
        await factory.stop()


@pytest.fixture
def open_folders():
    """Lets the sandboxes' users into a test's folder."""

    def let_in(folder: Path) -> None:
        for each in (folder, *folder.parents[:2]):
            if each.stat().st_uid == os.geteuid():
                each.chmod(0o755)

    return let_in
