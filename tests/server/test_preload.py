"""The policy's renderer is loaded before the first job asks, and what is wrong with it is said at once."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.testing import Reply, ScriptedLlm

from .conftest import Client, Serving, StartProcess

ENVIRONMENTS = {
    "environments": [
        {"name": "chat_agent", "agent_type": "tool_calling", "agent": {"sandbox": None, "max_turns": 1}},
    ],
    "roots": [Path(__file__).parents[2]],
}
ROW = {"question": "What is 6 times 7?"}


async def detail(client: Client, wanted: str | None) -> dict[str, Any]:
    """The only registered engine, once its detail holds `wanted`."""
    async with asyncio.timeout(60):
        while True:
            [server] = (await client.get("/status"))[1]["llm_servers"]
            if wanted is None or wanted in (server["detail"] or ""):
                return server
            await asyncio.sleep(0.02)


async def test_the_renderer_is_there_before_the_first_job(
    serving: Serving, scripted_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(**ENVIRONMENTS) as client, ScriptedLlm(Reply(text="42"), model=scripted_model) as llm:
        _, added = await client.post("/add_llm_server", {"address": llm.address})
        assert (added["healthy"], added["detail"]) == (True, None)
        async with asyncio.timeout(60):
            while f"the renderer of model '{scripted_model}' is ready" not in caplog.text:
                await asyncio.sleep(0.02)
        caplog.clear()
        result = await client.process("chat", instance=ROW)
        assert (result["status"], result["messages"][-1]["content"]) == ("completed", "42")
        assert "is ready" not in caplog.text


async def test_a_model_that_cannot_be_rendered_is_said_at_registration_logged_once_and_refused(
    serving: Serving, scripted_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(**ENVIRONMENTS) as client, ScriptedLlm(Reply(text="42"), model="/no/such/model") as llm:
        await client.post("/add_llm_server", {"address": llm.address})
        server = await detail(client, "refused")
        assert server["healthy"] is True
        assert "policy.tokenizer: there is no folder '/no/such/model'" in server["detail"]
        for _ in range(3):
            result = await client.process("chat", instance=ROW)
            assert (result["status"], result["reward"]) == ("failed", None)
            assert result["failure"]["message"] == server["detail"]
        errors = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
        assert errors == [server["detail"]]
        llm.model = scripted_model
        _, added = await client.post("/add_llm_server", {"address": llm.address})
        assert added["detail"] is None
        assert (await client.process("chat", instance=ROW))["status"] == "completed"


@pytest.mark.parametrize("after_s", [0.0, 0.5])
async def test_loading_holds_up_neither_the_start_nor_the_end_of_the_process(
    server_process: StartProcess, scripted_model: str, after_s: float
) -> None:
    server = server_process(policy={"model": scripted_model}, **ENVIRONMENTS)
    await asyncio.sleep(after_s)  # to be somewhere in the import of the libraries
    server.process.terminate()
    assert await server.ended(10) == 0
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert not [
        line for line in lines if line["level"] in ("WARNING", "ERROR") and "no isolation" not in line["message"]
    ]
