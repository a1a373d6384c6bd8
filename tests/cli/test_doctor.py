"""`doctor` as a user has it: exit codes, JSON, and what it says where the host refuses sandboxes."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from prorl_gym.cli import main

from .conftest import run, start

LOOPBACK_ERROR = "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted"


@pytest.fixture
def refusing_path(tmp_path: Path) -> str:
    """A PATH whose bwrap is refused by the host."""
    program = tmp_path / "bin/bwrap"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{LOOPBACK_ERROR}' >&2\nexit 1\n")
    program.chmod(0o755)
    for folder in [program.parent, *program.parent.parents][:-2]:
        folder.chmod(folder.stat().st_mode | 0o055)
    return f"{program.parent}:{os.environ['PATH']}"


async def test_a_host_that_refuses_loopback_is_named_with_cause_and_fix(
    root: Path, open_state: Path, refusing_path
) -> None:
    ended = await run("doctor", "environment=[words]", f"paths.state={open_state}", cwd=root, PATH=refusing_path)
    assert ended.code == 1, ended.err
    [row] = [line for line in ended.out.splitlines() if line.startswith("failed")]
    assert row.split()[:3] == ["failed", "bubblewrap", "works"]
    assert LOOPBACK_ERROR in row
    assert row.endswith("run outside a restricted container, or choose runtime=local (no isolation)")
    assert "1 failed" in ended.out.splitlines()[-1]
    assert "\x1b" not in ended.out


async def test_json_says_the_same(root: Path, open_state: Path, refusing_path) -> None:
    ended = await run(
        "doctor", "--json", "environment=[words]", f"paths.state={open_state}", cwd=root, PATH=refusing_path
    )
    assert ended.code == 1, ended.err
    told = json.loads(ended.out)
    assert set(told) == {"ok", "seconds", "findings"}
    assert told["ok"] is False
    for finding in told["findings"]:
        assert set(finding) == {"area", "name", "status", "detail", "fix", "figures"}
    [failure] = [finding for finding in told["findings"] if finding["status"] == "failed"]
    assert (failure["area"], failure["name"]) == ("bubblewrap", "works")
    assert LOOPBACK_ERROR in failure["detail"]
    assert "restricted container" in failure["fix"]
    areas = [finding["area"] for finding in told["findings"]]
    assert areas[0] == "host"
    assert areas[-1] == "model"


async def test_an_interrupt_ends_it_and_leaves_nothing(root: Path, open_state: Path) -> None:
    process = await start("doctor", "environment=[words]", "runtime=local", f"paths.state={open_state}", cwd=root)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            while line := await process.stdout.readline():
                if b"tool latency" in line:  # two sandboxes are up
                    break
            assert list((open_state / "records").iterdir())
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 130
    assert err.decode().endswith("interrupted\n")
    assert "Traceback" not in err.decode()
    assert list((open_state / "records").iterdir()) == list((open_state / "sandboxes").iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "message"), [("runtime=docker", "no option 'docker'"), ("--jsn", "did you mean --json?")]
)
def test_a_wrong_configuration_is_exit_code_2(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", argument]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
