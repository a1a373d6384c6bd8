"""Jobs as a client sees them over HTTP."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import time
from typing import Any

import aiohttp
import pytest

from prorl_gym.types import JobResult, JobView

from .conftest import Client, Serving, until


async def test_process_answers_with_the_result(client: Client) -> None:
    result = await client.process("noop", instance={"instance_id": "i1", "trajectory_id": 3}, job_id="a")
    parsed = JobResult.model_validate(result)
    assert (parsed.job_id, parsed.task, parsed.status, parsed.reward) == ("a", "noop", "completed", 1.0)
    assert (parsed.instance_id, parsed.trajectory_id) == ("i1", 3)
    assert parsed.resolved is True
    assert parsed.success is True


async def test_released_clients_request_is_understood(client: Client) -> None:
    body = {
        "instance": {"data_source": "noop", "instance_id": "x", "reward_model": {"ground_truth": "4"}},
        "sampling_params": {"model": "hosted_vllm/m", "api_key": "k", "temperature": 1.0, "max_iterations": 3},
        "job_id": None,
    }
    status, result = await client.post("/process", body)
    assert status == 200
    assert set(result) >= {
        "instance_id", "trajectory_id", "git_patch", "success", "error", "traceback", "finish", "messages", "tools",
        "end_properly", "resolved", "critical_error", "filter", "timing",
    }  # fmt: skip
    assert "ignored in sampling_params: api_key, model" in result["warnings"]


async def test_submit_then_poll(client: Client) -> None:
    status, accepted = await client.post("/jobs", {"task": "held", "instance": {}, "job_id": "h"})
    assert (status, accepted["job_id"]) == (202, "h")
    await until(lambda: client.handler("held").entered == 1)
    status, view = await client.get("/jobs/h")
    assert (status, view["status"], view["result"]) == (200, "run", None)
    assert [message["content"] for message in view["messages"]] == ["hello"]
    waiting = asyncio.create_task(client.get("/jobs/h?wait_s=30"))
    client.handler("held").free.set()
    status, view = await waiting
    assert JobView.model_validate(view).result is not None
    assert (status, view["status"], view["result"]["status"]) == (200, "completed", "completed")


async def test_long_poll_answers_when_its_time_is_over(client: Client) -> None:
    await client.post("/jobs", {"task": "slow", "instance": {}, "job_id": "s"})
    began = time.monotonic()
    status, view = await client.get("/jobs/s?wait_s=0.2")
    assert (status, view["result"]) == (200, None)
    assert 0.15 < time.monotonic() - began < 5


async def test_same_id_same_body_joins_and_another_body_is_refused(client: Client) -> None:
    first = asyncio.create_task(client.process("held", job_id="x"))
    await until(lambda: client.handler("held").entered == 1)
    again = asyncio.create_task(client.process("held", job_id="x"))
    status, error = await client.post("/process", {"task": "held", "instance": {"other": 1}, "job_id": "x"})
    assert (status, error["error"]["type"], error["error"]["field"]) == (409, "DuplicateJob", "job_id")
    client.handler("held").free.set()
    assert (await first)["job_id"] == (await again)["job_id"] == "x"
    assert client.handler("held").entered == 1
    assert (await client.process("held", job_id="x"))["status"] == "completed"
    assert client.handler("held").entered == 1


async def test_token_arrays_come_only_when_asked_for(client: Client) -> None:
    full = await client.process("talk", job_id="t")
    assert full["segments"][0]["response_ids"]
    assert full["messages"][1]["input_ids"]
    assert "ledger" not in full
    _, view = await client.get("/jobs/t")
    assert "segments" not in view["result"]
    assert "token_ids" not in view["result"]["messages"][1]
    _, view = await client.get("/jobs/t?include=segments,ledger")
    assert view["result"]["segments"] == full["segments"]
    assert len(view["result"]["ledger"]) == 2
    lean = await client.process("talk", include=["segments"])
    assert "messages" not in lean
    assert lean["segments"] == full["segments"]


async def test_compressed_only_when_parts_are_named(client: Client) -> None:
    url = client.address + "/process"
    body: dict[str, Any] = {"task": "talk", "instance": {"tokens": 2000}}
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        headers = {"accept-encoding": "gzip, deflate"}
        async with session.post(url, json={**body, "include": ["segments"]}, headers=headers) as response:
            assert response.headers["content-encoding"] == "gzip"
            assert len(json.loads(gzip.decompress(await response.read()))["segments"][0]["response_ids"]) == 4001
        async with session.post(url, json=body, headers=headers) as response:
            assert "content-encoding" not in response.headers
            json.loads(await response.read())
        async with session.post(
            url, json={**body, "include": ["segments"]}, headers={"accept-encoding": "identity"}
        ) as response:
            assert "content-encoding" not in response.headers


async def test_whatever_a_handler_returns_is_valid_json(client: Client) -> None:
    result = await client.process("odd")
    assert result["reward"] is None
    assert result["mask_sample"] is True
    result = await client.process("odd", instance={"reward": 0.5})
    assert result["reward"] == 0.5
    components = result["reward_components"]
    assert components["nan"] is None
    assert components["text"] == "\ufffdx"


async def test_cancel_by_id_answers_the_waiter_and_twice_is_harmless(client: Client) -> None:
    waiting = asyncio.create_task(client.process("held", job_id="c"))
    await until(lambda: client.handler("held").entered == 1)
    assert await client.post("/cancel", {"job_id": "c"}) == (
        200, {"cancelled": ["c"], "already_ended": [], "not_found": []})  # fmt: skip
    result = await waiting
    assert (result["status"], result["stop_reason"], result["critical_error"]) == ("cancelled",) * 3
    assert result["messages"][0]["content"] == "hello"
    assert result["mask_sample"] is True
    _, report = await client.post("/cancel", {"job_ids": ["c", "nobody"]})
    assert report == {"cancelled": [], "already_ended": ["c"], "not_found": ["nobody"]}


async def test_cancel_takes_the_union_of_prefix_and_group(client: Client) -> None:
    for number, group in ((1, "g"), (2, "g"), (3, "h")):
        fields = {"task": "slow", "instance": {}, "job_id": f"p{number}", "group_id": group}
        await client.post("/jobs", fields)
    _, report = await client.post("/cancel", {"prefix": "p1", "group_id": "h"})
    assert sorted(report["cancelled"]) == ["p1", "p3"]
    status, error = await client.post("/cancel", {})
    assert (status, error["error"]["field"]) == (400, "job_id")


async def test_job_goes_on_when_its_client_leaves(client: Client) -> None:
    waiting = asyncio.create_task(client.process("held", job_id="left"))
    await until(lambda: client.handler("held").entered == 1)
    waiting.cancel()
    await asyncio.wait([waiting])
    client.handler("held").free.set()
    _, view = await client.get("/jobs/left?wait_s=10")
    assert view["status"] == "completed"


async def test_client_that_leaves_takes_its_job_along_when_it_said_so(client: Client) -> None:
    waiting = asyncio.create_task(client.process("slow", job_id="gone", cancel_on_disconnect=True))
    await until(lambda: bool(client.service.pipeline.snapshot().active_run))
    waiting.cancel()
    await asyncio.wait([waiting])
    _, view = await client.get("/jobs/gone?wait_s=10")
    assert view["status"] == "cancelled"


async def test_job_stays_while_another_client_waits_for_it(client: Client) -> None:
    fields = {"job_id": "two", "cancel_on_disconnect": True}
    leaving, staying = (asyncio.create_task(client.process("held", **fields)) for _ in range(2))
    await until(lambda: client.requests_under_way == 2)
    leaving.cancel()
    await asyncio.wait([leaving])
    await until(lambda: client.requests_under_way == 1)
    client.handler("held").free.set()
    assert (await staying)["status"] == "completed"


async def read_events(client: Client, path: str, **headers: str) -> list[dict[str, Any]]:
    async with client.session.get(client.address + path, headers=headers) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = (await response.read()).decode()
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    events = []
    for block in blocks:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append(json.loads(fields["data"]))
        assert fields["id"] == str(events[-1]["seq"])
        assert fields["event"] == events[-1]["event"]
    return events


async def test_events_are_followed_live_and_replayed(client: Client) -> None:
    await client.post("/jobs", {"task": "held", "instance": {}, "job_id": "e"})
    following = asyncio.create_task(read_events(client, "/jobs/e/events"))
    await until(lambda: client.handler("held").entered == 1)
    client.handler("held").free.set()
    events = await following
    names = [event["event"] for event in events]
    assert names[0] == "queued"
    assert names[-1] == "completed"
    assert "greeting" in names
    assert next(event for event in events if event["event"] == "greeting")["text"] == "hello\nworld"
    seqs = [event["seq"] for event in events]
    assert seqs == list(range(1, len(seqs) + 1))
    assert await read_events(client, "/jobs/e/events", **{"Last-Event-ID": str(seqs[-2])}) == events[-1:]
    status, error = await client.get("/jobs/e/events", headers={"Last-Event-ID": "x"})
    assert (status, error["error"]["field"]) == (400, "last-event-id")


async def test_event_stream_keeps_a_quiet_connection_alive(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.server.event_stream.HEARTBEAT_S", 0.05)
    await client.post("/jobs", {"task": "slow", "instance": {}, "job_id": "q"})
    async with client.session.get(client.address + "/jobs/q/events") as response:
        async with asyncio.timeout(10):
            async for line in response.content:
                if line.startswith(b":"):
                    break


async def test_hundreds_of_calls_really_run_at_once(serving: Serving) -> None:
    pools = {stage: {"workers": 1000} for stage in ("init", "run", "eval")}
    async with serving(pipeline=pools) as client:
        waiting = [asyncio.create_task(client.process("held", job_id=f"j{number}")) for number in range(512)]
        await until(lambda: client.handler("held").entered == 512, 20)
        _, status = await client.get("/status")
        assert status["active_run"] == 512
        client.handler("held").free.set()
        results = await asyncio.gather(*waiting)
    assert {result["status"] for result in results} == {"completed"}


async def test_queue_time_is_no_run_time(serving: Serving) -> None:
    """L-15."""
    async with serving(pipeline={"run": {"workers": 1}}) as client:
        jobs = [client.process("slow", instance={"seconds": 0.3}, timeout_s=0.5) for _ in range(4)]
        results = await asyncio.gather(*jobs)
    assert {result["status"] for result in results} == {"completed"}
    assert max(sum(result["timing"]["queued"].values()) for result in results) > 0.5


async def test_no_job_is_lost_to_garbage_collection(client: Client) -> None:
    """L-17."""

    async def collect() -> None:
        while True:
            gc.collect()
            await asyncio.sleep(0.01)

    collecting = asyncio.create_task(collect())
    rows = [{"seconds": 0.01}] * 200
    results = await asyncio.gather(*(client.process("slow", instance=row) for row in rows))
    collecting.cancel()
    assert {result["status"] for result in results} == {"completed"}
