"""Roots with definitions, a stand-in for Apptainer that only copies, and one small real base image per session."""

import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prorl_gym.config.models import ImagesConfig, PathsConfig, ProrlConfig

STAND_IN = """#!/bin/sh
# Instead of building, copies the definition (the last argument but one names the image).
for argument; do previous=$last; last=$argument; done
echo "$@" >>"{calls}"
{extra}
if [ -d "$last" ]; then ls -R "$last" >"$previous"; else cp "$last" "$previous"; fi
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A search root with the definition `toy/box`."""
    folder = tmp_path / "root/resources_servers/toy/images"
    folder.mkdir(parents=True)
    (folder / "box.def.j2").write_text("{{ base }}\n\n%post\n    echo {{ greeting }} > /opt/greeting\n")
    (folder / "box.yaml").write_text(
        "base: docker://box:1\nlock: box.lock\nsources: [tool.sh]\nvalues: {greeting: hello}\n"
    )
    (folder / "box.lock").write_text("one==1\n")
    (folder / "tool.sh").write_text("echo tool\n")
    return tmp_path / "root"


@pytest.fixture
def config(tmp_path: Path, root: Path) -> Callable[..., ProrlConfig]:
    def make(**images: object) -> ProrlConfig:
        return ProrlConfig(
            paths=PathsConfig(state=tmp_path / "state", images=tmp_path / "images"),
            images=ImagesConfig.model_validate(images),
            roots=(root,),
        )

    return make


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put a program called apptainer on PATH; returns the file that lists its calls."""

    def make(extra: str = "") -> Path:
        calls = tmp_path / "calls"
        calls.touch()
        program = tmp_path / "bin/apptainer"
        program.parent.mkdir(exist_ok=True)
        program.write_text(STAND_IN.format(calls=calls, extra=extra))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        return calls

    return make


@pytest.fixture(scope="session")
def real_base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Debian folder with busybox and without Python, 17 MB."""
    for program in ("apptainer", "mmdebstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: scripts/install_apptainer.sh")
    work = tmp_path_factory.mktemp("base")
    folder = work / "rootfs"
    links = "; ".join(
        f'ln -s busybox "$1/bin/{name}"' for name in ("sh", "cat", "cp", "env", "id", "ls", "mkdir", "rm")
    )
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=extract", "--include=busybox-static,base-files,base-passwd",
         f"--extract-hook={links}; mkdir -p \"$1/opt\"; rm -rf \"$1\"/var/cache/apt \"$1\"/var/lib/apt",
         "bookworm", str(folder)],
        check=True,
    )  # fmt: skip
    yield folder
    shutil.rmtree(work)
