"""The portable tool environment."""

import os
import subprocess
import threading
import time

import pytest

from prorl_gym.errors import ConfigError
from prorl_gym.runtimes import toolenv


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return toolenv.tool_environment(tmp_path_factory.mktemp("toolenv"))


def test_it_is_made_once_and_found_again(made):
    state = made.folder.parent.parent
    before = made.folder.stat().st_ino
    started = time.monotonic()
    assert toolenv.tool_environment(state).folder == made.folder
    assert time.monotonic() - started < 1
    assert made.folder.stat().st_ino == before
    assert [path.name for path in made.folder.parent.iterdir() if path.is_dir()] == [made.digest]


def test_it_brings_its_own_libraries_and_nothing_of_ours(made):
    script = (
        "import sys, ssl, sqlite3, ctypes, lzma, bz2, uuid, hashlib; print(sys.prefix)\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}, sep='\\n')"
    )
    done = subprocess.run(
        [made.host_python, "-I", "-S", "-c", script], capture_output=True, text=True, check=True, env={}
    )
    prefix, *libraries = done.stdout.splitlines()
    assert prefix == str(made.folder / "host")
    assert libraries
    assert all(path.startswith(str(made.folder)) for path in libraries)
    assert sorted(path.name for path in (made.folder / "site/prorl_gym").iterdir() if path.is_dir()) == [
        "__pycache__", "toolserver",
    ]  # fmt: skip
    size = sum(path.lstat().st_size for path in made.folder.rglob("*"))
    assert size < 120 << 20


def test_every_user_may_read_it(made):
    assert all(path.stat().st_mode & 0o004 for path in made.folder.rglob("*"))


def test_threads_and_processes_make_it_once(tmp_path, monkeypatch):
    makes = []

    def slowly(target):
        makes.append(target)
        time.sleep(0.1)
        target.mkdir()

    monkeypatch.setattr(toolenv, "_make", slowly)
    threads = [threading.Thread(target=toolenv.tool_environment, args=[tmp_path]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(makes) == 1


def test_a_failed_build_leaves_nothing_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(toolenv, "_patchelf", lambda: "/bin/false")
    with pytest.raises(ConfigError, match="tool environment"):
        toolenv.tool_environment(tmp_path)
    assert not [path for path in (tmp_path / "toolenv").iterdir() if path.is_dir()]


def test_what_no_service_used_for_a_week_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(toolenv, "_make", lambda target: target.mkdir())
    old, recent = tmp_path / "toolenv/old", tmp_path / "toolenv/recent"
    for folder in (old, recent):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    toolenv.tool_environment(tmp_path)
    assert not old.exists()
    assert recent.exists()
