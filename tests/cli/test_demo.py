"""The demonstration, from its first line to the last process it started."""

import asyncio
import signal
from pathlib import Path

import orjson
import pytest

from prorl_gym.testing import Reply, Script, ScriptedLlm

from .conftest import run, start
from .test_rollout import processes_naming

RIGHT = Script((Reply(text=r"\boxed{42}"),))


@pytest.mark.slow
async def test_it_runs_on_a_backend_that_is_there_already(tmp_path: Path, scripted_model: str) -> None:
    async with ScriptedLlm(RIGHT, model=scripted_model) as llm:
        ended = await run("demo", cwd=tmp_path, DEMO_BACKEND=llm.address, TMPDIR=str(tmp_path))
    assert ended.code == 0, ended.out + ended.err
    results = [orjson.loads(line) for line in (tmp_path / "rollouts.jsonl").read_bytes().splitlines()]
    assert len(results) == 16
    assert sum(result["reward"] for result in results) == 4.0  # two of the problems have this answer
    assert ended.out.count("math_agent") == 17
    assert "16/16 rollouts" in ended.out
    assert processes_naming(str(tmp_path)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_no_process_outlives_it(tmp_path: Path, scripted_model: str, signum: signal.Signals) -> None:
    async with ScriptedLlm(Reply(hold=True), model=scripted_model) as llm:
        process = await start("demo", cwd=tmp_path, DEMO_BACKEND=llm.address, TMPDIR=str(tmp_path))
        await llm.until(lambda llm: llm.in_flight == 16, 60)
        process.send_signal(signum)
        async with asyncio.timeout(40):
            await process.communicate()
            while processes_naming(str(tmp_path)):
                await asyncio.sleep(0.1)
    assert process.returncode == (-9 if signum is signal.SIGKILL else 130)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_it_runs_as_a_newcomer_has_it(tmp_path: Path) -> None:
    ended = await run("demo", cwd=tmp_path, timeout_s=280, TMPDIR=str(tmp_path))
    assert ended.code == 0, ended.out + ended.err
    results = [orjson.loads(line) for line in (tmp_path / "rollouts.jsonl").read_bytes().splitlines()]
    assert len(results) == 16
    assert max(result["reward"] for result in results) == 1.0
    called = [m["name"] for result in results for m in result["messages"] if m["role"] == "tool"]
    assert "ipython" in called
    assert processes_naming(str(tmp_path)) == []


async def test_a_backend_that_does_not_answer_is_said(tmp_path: Path) -> None:
    ended = await run("demo", "runtime=local", cwd=tmp_path, DEMO_BACKEND="http://127.0.0.1:9", TMPDIR=str(tmp_path))
    assert ended.code == 2, ended.out + ended.err
    assert "error: DEMO_BACKEND: http://127.0.0.1:9 does not serve" in ended.err
    assert processes_naming(str(tmp_path)) == []
