"""The client against the real service over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from server.conftest import Client as Serving
from server.conftest import serving_in, until

from prorl_gym.client import RolloutClient
from prorl_gym.errors import DuplicateJob, JobNotFound, NotRunning, RequestError, UnknownTask
from prorl_gym.testing import Reply, ScriptedLlm
from prorl_gym.types import JobStatus


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving_in(tmp_path, pipeline={"run": {"workers": 600}}) as serving:
        yield serving


@pytest.fixture
async def client(service: Serving) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(service.address) as client:
        yield client


async def test_a_job_comes_back_with_what_was_asked_for(client: RolloutClient) -> None:
    row = {"turns": 3, "tokens": 400}
    result = await client.process(row, task="talk", return_ledger=True)
    assert (result.status, result.success, result.reward) == (JobStatus.COMPLETED, True, 1.0)
    (segment,) = result.segments
    assert segment.num_turns == 3
    assert sum(segment.response_mask) == 1200
    assert segment.versions[0][2] == 7
    assert [message.role for message in result.messages] == ["user", "assistant"] * 3
    assert all(message.input_ids is None for message in result.messages)
    assert len(result.ledger or []) == 3
    bare = await client.process(row, task="talk", include=("segments",))
    assert not bare.messages
    assert bare.segments
    assert bare.ledger is None


async def test_512_process_calls_really_run_at_once(service: Serving, client: RolloutClient) -> None:
    handler = service.handler("held")
    calls = [asyncio.create_task(client.process({"n": n}, task="held")) for n in range(512)]
    await until(lambda: handler.entered == 512, timeout_s=60)
    assert (await client.status()).active_run == 512
    handler.free.set()
    results = await asyncio.gather(*calls)
    assert {result.status for result in results} == {JobStatus.COMPLETED}


async def test_cancelling_the_call_cancels_the_job(service: Serving, client: RolloutClient) -> None:
    call = asyncio.create_task(client.process({}, task="held", job_id="mine"))
    await until(lambda: service.handler("held").entered == 1)
    view = await client.get("mine")
    assert (view.status, view.messages[0].content, view.result) == (JobStatus.RUN, "hello", None)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    result = await client.wait("mine", timeout_s=10)
    assert (result.status, result.mask_sample) == (JobStatus.CANCELLED, True)
    assert (await client.cancel(prefix="mi")).already_ended == ["mine"]
    assert (await client.cancel("nobody")).not_found == ["nobody"]


async def test_events_end_with_the_final_status(service: Serving, client: RolloutClient) -> None:
    call = asyncio.create_task(client.process({}, task="held", job_id="mine"))
    await until(lambda: service.handler("held").entered == 1)
    events = client.events("mine")
    seen = []
    async for event in events:
        seen.append(event)
        if event.event == "greeting":
            assert event.fields["text"] == "hello\nworld"
            service.handler("held").free.set()
    assert seen[-1].event == "completed"
    assert "run" in {event.event for event in seen}
    await call


async def test_refusals_are_typed(client: RolloutClient) -> None:
    with pytest.raises(UnknownTask, match="noop"):
        await client.process({}, task="nonsense")
    with pytest.raises(JobNotFound):
        await client.get("nobody")
    await client.process({}, task="noop", job_id="mine")
    with pytest.raises(DuplicateJob):
        await client.process({"another": "body"}, task="noop", job_id="mine")
    with pytest.raises(RequestError) as caught:
        await client.add_llm_server("n1:8000")
    assert caught.value.field == "address"
    await client.stop()
    with pytest.raises(NotRunning):
        await client.process({}, task="noop")
    assert (await client.start()).status == "running"
    assert (await client.process({}, task="noop")).success


async def test_backends_and_pools_are_managed(client: RolloutClient) -> None:
    async with ScriptedLlm(Reply(), model="qwen") as llm:
        server = await client.add_llm_server(llm.address + "/v1", policy_version=2, policy="mine")
        assert (server.healthy, server.model, server.policy_version) == (True, "qwen", 2)
        assert [one.address for one in await client.llm_servers()] == [llm.address]
        assert await client.remove_llm_server(llm.address, policy="mine")
        assert not await client.remove_llm_server(llm.address, policy="mine")
        await client.add_llm_server(llm.address)
        cleared = await client.clear_llm_server(in_flight="park")
        assert [one.address for one in cleared] == [llm.address]
        assert (await client.status()).llm_servers == []
    assert await client.resize_pools(run=3)
    assert "noop" in (await client.environments()).tasks
    assert (await client.health()).instance_id == (await client.status()).instance_id


async def test_lone_surrogates_and_a_large_row_go_through(client: RolloutClient) -> None:
    result = await client.process({"text": "\ud800 \x00", "blob": "x" * 10_000_000, "seconds": 0}, task="slow")
    assert result.success
