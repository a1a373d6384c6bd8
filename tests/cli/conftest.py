"""The command line as a user has it: processes, files, exit codes."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

WORDS = """\
# @package _global_
gym:
  words: {resources_servers: {words: {entrypoint: app.py, domain: other}}}
  words_agent:
    responses_api_agents:
      tool_calling:
        resources_server: {type: resources_servers, name: words}
        sandbox: null
        max_turns: 1
"""
APP = '''\
"""Rewards the expected answer."""

from prorl_gym.resources.base import ResourcesServer, Verdict


class WordsServer(ResourcesServer):
    """By equality."""

    async def verify(self, session_id, row, outcome):
        return Verdict(reward=float(outcome.answer == row["expected_answer"]))
'''


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str


async def run(*arguments: str, cwd: Path, timeout_s: float = 60.0, **environment: str) -> Finished:
    """Run `python -m prorl_gym ARGUMENTS` to its end."""
    process = await start(*arguments, cwd=cwd, **environment)
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Finished(process.returncode, out.decode(), err.decode())


async def start(*arguments: str, cwd: Path, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "prorl_gym",
        *arguments,
        cwd=cwd,
        env={**os.environ, "TMPDIR": str(cwd), **environment},  # logs of failed starts stay there
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A marked working directory with the environment `words`, which needs no sandbox."""
    (tmp_path / "prorl_gym_root").touch()
    (tmp_path / "conf/environment").mkdir(parents=True)
    (tmp_path / "conf/environment/words.yaml").write_text(WORDS)
    (tmp_path / "resources_servers/words").mkdir(parents=True)
    (tmp_path / "resources_servers/words/app.py").write_text(APP)
    return tmp_path
