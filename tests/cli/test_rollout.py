"""`rollout` against a real service of its own, and a scripted language model."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import orjson
import pytest

from prorl_gym.testing import Conversation, Reply, Script, ScriptedLlm

from .conftest import run, start

RIGHT = Script(
    replies=(Reply(text="no"),),
    conversations=(Conversation("Say yes.", (Reply(text="yes"),)),),
)


@pytest.fixture
def rows(root: Path) -> Path:
    path = root / "rows.jsonl"
    rows = [{"question": "Say yes.", "expected_answer": "yes"}, {"question": "Say maybe.", "expected_answer": "maybe"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(root: Path, llm: ScriptedLlm, *more: str) -> list[str]:
    return [
        "rollout", "input=rows.jsonl", "output=out.jsonl", "task=words", "environment=[words]", "runtime=local",
        f'paths.state="{root}/state"', f'backend.addresses=["{llm.address}"]', *more,
    ]  # fmt: skip


def lines(root: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (root / "out.jsonl").read_bytes().splitlines()]


def processes_naming(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                cmdline = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in cmdline:
                found.append(cmdline)
    return found


@pytest.mark.usefixtures("rows")
async def test_a_data_set_is_rolled_out_verified_and_complete(root: Path, scripted_model: str) -> None:
    async with ScriptedLlm(RIGHT, model=scripted_model) as llm:
        ended = await run(*command(root, llm, "num_repeats=2"), cwd=root)
        assert ended.code == 0, ended.out + ended.err
        results = lines(root)
        assert sorted((r["_ng_task_index"], r["_ng_rollout_index"], r["reward"]) for r in results) == [
            (0, 0, 1.0), (0, 1, 1.0), (1, 0, 0.0), (1, 1, 0.0),
        ]  # fmt: skip
        assert all(r["segments"] and r["ledger"] for r in results)
        summary = next(line for line in ended.out.splitlines() if line.split()[:1] == ["words_agent"])
        assert summary.split()[1:4] == ["4", "0", "0.500"]
        verified = await run("verify", "out.jsonl", cwd=root)
        assert verified.code == 0, verified.out

        calls = len(llm.requests)
        again = await run(*command(root, llm, "num_repeats=2"), cwd=root)
        assert again.code == 0
        assert "4 of 4 are there" in again.out
        assert len(llm.requests) == calls
    assert processes_naming(str(root)) == []


@pytest.mark.usefixtures("rows")
async def test_an_interrupted_run_leaves_nothing_behind_and_is_continued(root: Path, scripted_model: str) -> None:
    with (root / "rows.jsonl").open("a") as rows:
        rows.write('{"expected_answer": "of a row that asks nothing"}\n')
    held = Script(replies=(Reply(text="no", hold=True),), conversations=RIGHT.conversations)
    async with ScriptedLlm(held, model=scripted_model) as llm:
        process = await start(*command(root, llm), cwd=root)
        await llm.until(lambda llm: llm.in_flight == 1 and len(llm.requests) == 2, 60)
        async with asyncio.timeout(10):
            while not lines(root):
                await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(40):
            out, err = await process.communicate()
    assert process.returncode == 130, err
    assert b"interrupted: 1 of 3 rollouts are in out.jsonl; the same command continues" in out
    assert b"Traceback" not in err
    assert processes_naming(str(root)) == []
    assert [r["_ng_task_index"] for r in lines(root)] == [0]

    async with ScriptedLlm(RIGHT, model=scripted_model) as llm:
        ended = await run(*command(root, llm), cwd=root)
    assert "continuing out.jsonl: 1 of 3 are there" in ended.out
    assert len(llm.requests) == 1
    assert [r["reward"] for r in lines(root) if not r["mask_sample"]] == [1.0, 0.0]
    assert ended.code == 1  # the row that asks nothing
    assert "refused once: " in ended.out
    log = ended.out.split("the service's log stays in ")[1].split("\n")[0]
    assert "serving on" in (Path(log) / "service.log").read_text()


@pytest.mark.usefixtures("rows")
async def test_a_service_that_cannot_start_is_said_in_its_own_words(root: Path, scripted_model: str) -> None:
    (root / "resources_servers/words/app.py").write_text("class Nothing: ...\n")
    async with ScriptedLlm(RIGHT, model=scripted_model) as llm:
        ended = await run(*command(root, llm), cwd=root)
    assert ended.code == 2, ended.err
    assert ended.err.startswith("error: service: ")
    assert "Traceback" not in ended.err
    assert processes_naming(str(root)) == []


@pytest.mark.usefixtures("rows")
async def test_an_address_that_is_no_rollout_service_is_refused_before_any_row(root: Path, scripted_model: str) -> None:
    async with ScriptedLlm(RIGHT, model=scripted_model) as llm:
        ended = await run("rollout", "input=rows.jsonl", "output=out.jsonl", f"server={llm.address}", cwd=root)
    assert ended.code == 2, ended.out + ended.err
    assert "does not answer like a prorl_gym service" in ended.err


@pytest.mark.usefixtures("rows")
async def test_a_backend_that_is_not_there_is_told_while_rollouts_wait(root: Path, scripted_model: str) -> None:
    async with ScriptedLlm(RIGHT, model=scripted_model) as llm:
        line = command(root, llm, "timeout_s=3")
    ended = await run(*line, cwd=root)
    assert ended.code == 1, ended.out + ended.err
    assert f"backend {llm.address.removesuffix('/v1')}: " in ended.out
