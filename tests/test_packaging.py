"""What a user installs works from an empty folder: wheel, wheel out of the sdist, editable install."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHECKOUT = Path(__file__).resolve().parent.parent
DEPENDENCIES = Path(sysconfig.get_paths()["purelib"])
"""Third-party libraries of the test environment; by PYTHONPATH, where an editable install's .pth has no effect."""


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    clean = {"PATH": os.environ["PATH"], "HOME": str(cwd), **env}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def uv(*arguments: str | Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(DEPENDENCIES)}  # for the build backend, which is not isolated
    subprocess.run([sys.executable, "-m", "uv", "--quiet", *map(str, arguments)], check=True, cwd=CHECKOUT, env=env)


def build(folder: Path, *what: str) -> Path:
    """Build and return the wheel."""
    uv("build", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder, *what)
    (wheel,) = folder.glob("*.whl")
    return wheel


@dataclass(frozen=True)
class Installed:
    python: Path
    folder: Path
    """Empty, to run in."""


def install(folder: Path, *what: str | Path) -> Installed:
    """Install without dependencies into a new environment."""
    uv("venv", "--python", sys.executable, folder / "venv")
    python = folder / "venv" / "bin" / "python"
    uv("pip", "install", "--python", python, "--no-deps", "--no-build-isolation", *what)
    (folder / "empty").mkdir()
    return Installed(python, folder / "empty")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "wheel": build(tmp_path_factory.mktemp("wheel"), "--wheel"),
        "sdist": build(tmp_path_factory.mktemp("sdist")),
    }


def test_the_sdist_builds_the_same_wheel(wheels: dict[str, Path]) -> None:
    names = {}
    for kind, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            names[kind] = set(archive.namelist())
    assert names["wheel"] == names["sdist"]
    for needed in (
        "prorl_gym/py.typed",
        "prorl_gym/_bundled/conf/config.yaml",
        "prorl_gym/_bundled/resources_servers/math/app.py",
        "prorl_gym/_bundled/agents/tool_calling/app.py",
        "prorl_gym/_bundled/agents/tool_calling/images/python.def.j2",
        "training_recipes/__init__.py",
    ):
        assert needed in names["wheel"]
    assert not [name for name in names["wheel"] if "__pycache__" in name or name.startswith("tests/")]


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_an_installation_works_from_an_empty_folder(kind: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    what = ("--editable", CHECKOUT) if kind == "editable" else (wheels[kind],)
    installed = install(tmp_path, *what)
    env = {"PYTHONPATH": str(DEPENDENCIES)}
    where = run(
        installed.python,
        "-c",
        "import prorl_gym, training_recipes; print(prorl_gym.__file__); print(training_recipes.__file__)",
        cwd=installed.folder,
        **env,
    )
    expected = CHECKOUT if kind == "editable" else tmp_path / "venv"
    assert [Path(line).is_relative_to(expected) for line in where.split()] == [True, True]
    assert "math_agent" in run(installed.python, "-m", "prorl_gym", "environments", cwd=installed.folder, **env)
    assert "math_agent" in run(tmp_path / "venv/bin/prorl-gym", "environments", cwd=installed.folder, **env)


def test_the_client_needs_httpx_and_pydantic_only(wheels: dict[str, Path], tmp_path: Path) -> None:
    installed = install(tmp_path, wheels["wheel"])
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for path in top_level_paths({"httpx", "pydantic"}):
        (libraries / path.name).symlink_to(path)
    program = (
        "import importlib.util\n"
        "assert all(importlib.util.find_spec(name) is None for name in ('aiohttp', 'fastapi', 'orjson', 'hydra'))\n"
        "import prorl_gym.client, prorl_gym.types\n"
        "print(prorl_gym.client.RolloutClient('http://localhost:8006').address)\n"
    )
    printed = run(installed.python, "-c", program, cwd=installed.folder, PYTHONPATH=str(libraries))
    assert printed.strip() == "http://localhost:8006"


def top_level_paths(names: set[str]) -> set[Path]:
    """Packages and modules of distributions and of all that they require, extras aside."""
    found: set[str] = set()
    paths: set[Path] = set()
    todo = {canonicalize_name(name) for name in names}
    while todo:
        name = todo.pop()
        found.add(name)
        distribution = importlib.metadata.distribution(name)
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.add(canonicalize_name(requirement.name))
        tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in {"..", "__pycache__"}}
        paths |= {Path(str(distribution.locate_file(top))) for top in tops}
        todo -= found
    return paths
