"""Builds and fetches by the real Apptainer, from a Debian folder with busybox and without Python."""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_gym.cli import main
from prorl_gym.config.models import ProrlConfig
from prorl_gym.runtimes.images import RuntimeImageBuilder
from prorl_gym.runtimes.images.program import ImageError
from prorl_gym.runtimes.toolenv import MOUNT_POINT, tool_environment
from tests.runtimes.images.registry import Registry, serving

pytestmark = [pytest.mark.apptainer, pytest.mark.timeout(180)]
Config = Callable[..., ProrlConfig]


@pytest.fixture(scope="session")
def packed_base(real_base: Path) -> Path:
    """The base as a .sif, so that builds need not read the folder again."""
    image = real_base.parent / "base.sif"
    options = ["--mksquashfs-args", "-comp gzip -Xcompression-level 1 -wildcards -e dev/*"]
    command = ["apptainer", "--silent", "build", *options, str(image), str(real_base)]
    subprocess.run(command, env=environment(real_base), check=True)
    return image


def environment(folder: Path) -> dict[str, str]:
    """For Apptainer used by the tests themselves."""
    own = {
        "HOME": str(folder.parent),
        "APPTAINER_CACHEDIR": str(folder.parent),
        "APPTAINER_CONFIGDIR": str(folder.parent),
    }
    return {"PATH": os.environ["PATH"], **own}


def inside(image: Path, *command: str, action: str = "exec", options: tuple[str, ...] = ()) -> str:
    """What a command prints in the image."""
    line = ["apptainer", "--silent", action, "--userns", "--containall", *options, str(image), *command]
    done = subprocess.run(line, env=environment(image), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_definition_becomes_an_image(
    config: Config, real_base: Path, packed_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    greeting = "it's $(id) `id` {{ x }} %setup \\"
    images = {"bases": {"toy/box": f"localimage:{packed_base}"}, "values": {"toy/box": {"greeting": greeting}}}
    builder = RuntimeImageBuilder(config(**images))
    built = await builder.build("toy/box")
    assert built.made
    assert built.image is not None
    assert inside(built.path, "cat", "/opt/greeting") == f"{greeting}\n"
    assert built.image.record.size_bytes == built.path.stat().st_size
    assert list(home.iterdir()) == []
    assert list((tmp_path / "state/apptainer/tmp").iterdir()) == []
    tools = await asyncio.to_thread(tool_environment, tmp_path / "state")
    bound = ("--bind", f"{tools.folder}:{MOUNT_POINT}:ro")
    program = f"{MOUNT_POINT}/bin/python3"
    assert inside(built.path, program, "-IS", "-c", "print(6 * 7)", options=bound) == "42\n"
    assert "python" not in inside(built.path, "ls", "/bin")
    images["bases"] = {"toy/box": f"localimage:{real_base}"}  # a folder with device nodes and many owners
    folder = await RuntimeImageBuilder(config(**images, format="directory")).build("toy/box")
    assert folder.path.is_dir()
    assert inside(folder.path, "cat", "/opt/greeting") == f"{greeting}\n"


async def test_a_task_family_brings_its_own_kind_of_image(config: Config, root: Path, packed_base: Path) -> None:
    """A virtual machine for GUI tasks: a disk, a program that boots it, a start script; the builder knows of none."""
    folder = root / "agents/desktop/images"
    folder.mkdir(parents=True)
    (folder / "qemu-system-toy").write_text('#!/bin/sh\necho "booting $(cat /vm/disk.img) with $*"\n')
    (folder / "qemu.yaml").write_text("sources: [qemu-system-toy]\nvalues: {memory_mb: 512, disk: 'guest disk'}\n")
    (folder / "qemu.def.j2").write_text(
        f"""\
Bootstrap: localimage
From: {packed_base}

%files
    qemu-system-toy /usr/bin/qemu-system-toy

%post
    mkdir -p /vm
    echo {{{{ disk }}}} > /vm/disk.img
    chmod 0755 /usr/bin/qemu-system-toy 2>/dev/null || busybox chmod 0755 /usr/bin/qemu-system-toy

%environment
    export VM_DISPLAY=none

%runscript
    exec qemu-system-toy -m {{{{ memory_mb }}}} -display "$VM_DISPLAY" "$@"
"""
    )
    built = await RuntimeImageBuilder(config()).build("desktop/qemu")
    assert inside(built.path, "-snapshot", action="run") == "booting guest disk with -m 512 -display none -snapshot\n"


async def test_a_failing_build_keeps_nothing_and_shows_the_last_lines(
    config: Config, root: Path, packed_base: Path, tmp_path: Path
) -> None:
    with (root / "resources_servers/toy/images/box.def.j2").open("a") as template:
        template.write("    cat /nowhere\n")
    with pytest.raises(ImageError, match=r"(?s)apptainer build failed.*can't open '/nowhere'"):
        await RuntimeImageBuilder(config(bases={"toy/box": f"localimage:{packed_base}"})).build("toy/box")
    assert list((tmp_path / "images/partial").iterdir()) == []
    assert RuntimeImageBuilder(config()).store.images() == []


async def test_a_cancelled_build_leaves_no_process(
    config: Config, root: Path, packed_base: Path, tmp_path: Path
) -> None:
    with (root / "resources_servers/toy/images/box.def.j2").open("a") as template:
        template.write("    busybox sleep 599\n")
    building = asyncio.create_task(
        RuntimeImageBuilder(config(bases={"toy/box": f"localimage:{packed_base}"})).build("toy/box")
    )
    async with asyncio.timeout(60):
        while not any("sleep\x00599" in line for line in ours(tmp_path)):
            assert not building.done()
            await asyncio.sleep(0.05)
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building
        while ours(tmp_path):
            await asyncio.sleep(0.05)
    assert list((tmp_path / "images/partial").iterdir()) == []


def ours(folder: Path) -> list[str]:
    """Command lines of live processes that came from this test's builder, by the environment they carry or inherit."""
    mine = str(folder).encode()
    own = {os.getpid()}
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    marked: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            line = (entry / "cmdline").read_bytes()
            carried = (entry / "environ").read_bytes()
        except OSError:
            continue
        pid = int(entry.name)
        if state == "Z" or pid in own:
            continue
        parents[pid] = int(parent)
        lines[pid] = line.decode(errors="replace")
        if mine in line or mine in carried:
            marked.add(pid)

    def descends(pid: int) -> bool:
        while pid in parents:
            if pid in marked:
                return True
            pid = parents[pid]
        return False

    return [line for pid, line in lines.items() if descends(pid)]


def test_pull_packs_copies_and_uses_in_place(
    tmp_path: Path, real_base: Path, packed_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    names = [f"localimage:{real_base}", f"localimage:{packed_base}", str(packed_base), "docker://127.0.0.1:1/no/such:1"]
    rows.write_text("".join(json.dumps({"image": name}) + "\n" for name in [*names, "docker://evil:1"]))
    allow = json.dumps([*names[:3], "docker://127.0.0.1:1/*"])
    began = time.monotonic()
    paths = [f"paths.state={tmp_path}/state", f"paths.images={tmp_path}/images"]
    assert main(["images", "pull", str(rows), f"images.allow={allow}", *paths]) == 1
    out, err = capsys.readouterr()
    assert "2 fetched, 1 there already, 2 failed" in out
    assert "docker://127.0.0.1:1/no/such:1: apptainer pull failed" in err
    assert "connection refused" in err
    assert "rows.jsonl:5: image 'docker://evil:1' is not allowed" in err
    assert time.monotonic() - began < 120
    assert main(["images", "list", "--json", *paths]) == 0
    images = json.loads(capsys.readouterr().out)["images"]
    assert {image["name"] for image in images} == set(names[:2])
    for image in images:
        assert inside(Path(image["path"]), "cat", "/etc/debian_version").startswith("12")


def test_images_come_from_registries_and_serve_as_bases(
    tmp_path: Path, root: Path, config: Config, real_base: Path, packed_base: Path
) -> None:
    registry = Registry()
    registry.add_docker("1", real_base)
    registry.add_oras("sif", packed_base)
    with serving(registry) as host:
        docker, oras = f"docker://{host}/toy/box:1", f"oras://{host}/toy/box:sif"
        builder = RuntimeImageBuilder(config(plain_http=True, bases={"toy/box": docker}))

        async def obtain() -> list[Path]:
            return [
                (await builder.pull(docker)).path,
                (await builder.pull(oras)).path,
                (await builder.build("toy/box")).path,
            ]

        pulled, sif, built = asyncio.run(obtain())
        assert asyncio.run(builder.locate(docker.removeprefix("docker://"))) == pulled
    assert inside(pulled, "env").count("FROM_HUB=yes") == 1
    assert sif.read_bytes() == packed_base.read_bytes()
    assert inside(built, "cat", "/opt/greeting") == "hello\n"
