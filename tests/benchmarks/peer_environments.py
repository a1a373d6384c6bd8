"""Environments of the peers: made with uv when missing, named after the packages that they hold."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "peers"
HOME = Path("~/.cache/prorl_gym/venvs").expanduser()
PYTHON = (3, 12)
"""OpenHands tools want it at least; the others get the same one, so that all are compared under one Python."""
INSTALL_TIMEOUT_S = 600


class PeerMissing(Exception):
    """A peer that this machine cannot have; the message says why."""


def python_of(name: str) -> Path:
    """The Python of an environment that holds what `scripts/constraints/peers-NAME.txt` lists.

    Raises:
        PeerMissing: It cannot be made.
    """
    made = _environment(name)
    if isinstance(made, str):
        raise PeerMissing(made)
    return made / "bin" / "python"


@functools.cache
def _environment(name: str) -> Path | str:
    """Its folder, or why there is none: tried once."""
    constraints = ROOT / "scripts" / "constraints" / f"peers-{name}.txt"
    digest = hashlib.sha256(constraints.read_bytes() + repr(PYTHON).encode()).hexdigest()[:12]
    made = HOME / f"{name}-{digest}"
    if not made.exists():
        HOME.mkdir(parents=True, exist_ok=True)
        print(f"installing {name} into {made}", file=sys.stderr)
        try:
            _install(constraints, made)
        except PeerMissing as error:
            shutil.rmtree(made, ignore_errors=True)
            return str(error)
    return made


def _install(constraints: Path, target: Path) -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else "uv"
    _run([uv, "venv", "--quiet", "--python", _interpreter(), str(target)])
    python = str(target / "bin" / "python")
    _run([uv, "pip", "install", "--quiet", "--python", python, "--requirements", str(constraints)])


def _interpreter() -> str:
    """An interpreter that is new enough: this one, one on PATH, or one of pyenv's, whose shims may refuse to run."""
    names = [f"python3.{minor}" for minor in range(PYTHON[1], PYTHON[1] + 3)]
    on_path = [found for name in names if (found := shutil.which(name))]
    of_pyenv = [str(path) for path in sorted(Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python3"))]
    newer = f"import sys; sys.exit(sys.version_info < {PYTHON})"
    for candidate in (sys.executable, *on_path, *of_pyenv):
        if subprocess.run([candidate, "-c", newer], capture_output=True).returncode == 0:
            return candidate
    raise PeerMissing("no Python >= 3.12 on this machine")


def _base_python() -> str:
    """pyenv's, which uv does not look at; else whatever uv finds or fetches."""
    versions = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    return next((str(folder / "bin" / "python") for folder in versions.glob(f"{PYTHON}.*")), PYTHON)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(str(error)) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PeerMissing(f"not installed: {last.strip()}")


class Peer:
    """A running peer script."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer()

    def measure(self, command: str, expect: str, repeats: int) -> list[float]:
        """Seconds of each run.

        Raises:
            PeerMissing: It broke, or printed something else than what the command prints.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, "expect": expect, "repeats": repeats}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if answer["wrong"] == repeats:
            raise PeerMissing(f"{command!r} never gave what it prints")
        return list(answer["samples"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerMissing(f"its script ended with status {self._process.wait(30)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def peer(environment: str, script: str, *arguments: str) -> Iterator[Peer]:
    """A peer's script under its own Python, ended at the end.

    Raises:
        PeerMissing: It cannot be had here.
    """
    command = [str(python_of(environment)), str(SCRIPTS / script), *arguments]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, "PYTHONPATH": "", "TMUX_TMPDIR": tempfile.gettempdir()},
        ) as process,
    ):
        assert process.stdin is not None
        try:
            yield Peer(process)
        except PeerMissing as error:
            said.seek(0)
            last = said.read().strip().splitlines()[-1:]
            raise PeerMissing("; ".join([str(error), *last])) from None
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
