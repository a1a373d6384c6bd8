"""Whatever a client sends is answered with an error that helps, and never with a 500."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from .conftest import Client, Serving, serving_in

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with serving_in(tmp_path_factory.mktemp("server")) as client:
        yield client


JOB = {"task": "noop", "instance": {}}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'{"task": "noop", "instance": {}', "line 1 column"),
        (b'{"instance": {}\n, }', "line 2 column"),
        (b"", "empty"),
        (b'{"instance": {"x": NaN}}', "malformed JSON"),
        (b'{"instance": {"x": -Infinity}}', "malformed JSON"),
        (b'{"instance": {"x": 1e999}}', "malformed JSON"),
        (b'{"instance": {"x": "a\x00b"}}', "malformed JSON"),
        (b'{"instance": {"x": "\xff\xfe"}}', "malformed JSON"),
        (b'{"instance": {"x": "\xed\xa0\x80"}}', "malformed JSON"),
        (b'{"instance": ' + b"[" * 100_000, "malformed JSON"),
        (b"\x00", "malformed JSON"),
        (b"[]", ""),
        (b"null", ""),
        (b'"text"', ""),
    ],
)  # fmt: skip
async def test_malformed_bodies(client: Client, raw: bytes, says: str) -> None:
    for path in ("/process", "/jobs", "/cancel", "/add_llm_server"):
        status, error = await client.post(path, raw)
        assert status == 400
        assert says in error["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"task": "noop"}, "instance"),
        ({"task": "noop", "instance": []}, "instance"),
        ({"task": 1, "instance": {}}, "task"),
        ({**JOB, "job_id": ""}, "job_id"),
        ({**JOB, "job_id": "a/b"}, "job_id"),
        ({**JOB, "job_id": "a\u0000"}, "job_id"),
        ({**JOB, "job_id": ".."}, "job_id"),
        ({**JOB, "job_id": "x" * 201}, "job_id"),
        ({**JOB, "timeout_s": -1}, "timeout_s"),
        ({**JOB, "priority": 1 << 70}, "priority"),
        ({**JOB, "colour": "red"}, "colour"),
        ({**JOB, "include": ["everything"]}, "include.0"),
        ({**JOB, "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
        ({**JOB, "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ({**JOB, "sampling_params": {"stop": [1]}}, "sampling_params.stop.0"),
        ({**JOB, "sampling_params": {"stop": ""}}, "sampling_params.stop.0"),
        ({**JOB, "sampling_params": {"stop_token_ids": [-1]}}, "sampling_params.stop_token_ids.0"),
        ({**JOB, "sampling_params": {"seed": 1 << 63}}, "sampling_params.seed"),
        ({**JOB, "stage_timeouts_s": {"run": "soon"}}, "stage_timeouts_s.run"),
    ],
)  # fmt: skip
async def test_wrong_fields_are_named(client: Client, body: dict[str, Any], field: str) -> None:
    for path in ("/process", "/jobs"):
        status, error = await client.post(path, body)
        assert (status, error["error"]["field"]) == (400, field)
        assert field in error["error"]["message"]


async def test_unknown_task_lists_the_known_ones(client: Client) -> None:
    for body in ({"task": "nope", "instance": {}}, {"instance": {}}, {"instance": {"data_source": "nope"}}):
        status, error = await client.post("/process", body)
        assert (status, error["error"]["type"]) == (400, "UnknownTask")
        assert "noop" in error["error"]["message"]


async def test_error_does_not_repeat_what_was_sent(client: Client) -> None:
    _, error = await client.post("/process", {**JOB, "timeout_s": "s3cret-" * 1000})
    assert "s3cret" not in json.dumps(error)
    _, error = await client.post("/process", {**JOB, "k" * 1_000_000: 1})
    assert len(json.dumps(error)) < 2000


async def test_lone_surrogates_and_escaped_nul_are_data(client: Client) -> None:
    raw = rb'{"task": "noop", "instance": {"instance_id": "a\ud800b\u0000\\ud800 \ud83d\ude00"}}'
    status, result = await client.post("/process", raw)
    assert status == 200
    assert result["instance_id"] == "a\ufffdb\x00\\ud800 \U0001f600"


async def test_last_of_duplicate_keys_counts(client: Client) -> None:
    status, result = await client.post("/process", b'{"task": "nope", "task": "noop", "instance": {}}')
    assert (status, result["task"]) == (200, "noop")


async def test_deeply_nested_instance_is_answered(client: Client) -> None:
    for depth in (200, 1000):
        raw = b'{"task": "noop", "job_id": "deep", "instance": {"x": ' + b"[" * depth + b"]" * depth + b"}}"
        for _ in range(2):
            status, _ = await client.post("/process", raw)
            assert status in (200, 400, 409)


async def test_empty_and_huge_instances(client: Client) -> None:
    assert (await client.process("noop", instance={}))["status"] == "completed"
    row = {"instance_id": "big", "text": "x" * 10_000_000}
    assert (await client.process("noop", instance=row))["instance_id"] == "big"


async def test_body_limit_holds_for_any_framing(serving: Serving) -> None:
    async with serving(server={"port": 0, "max_body_bytes": 10_000}) as client:
        body = json.dumps({**JOB, "instance": {"x": "y" * 20_000}}).encode()

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 1000):
                yield body[start : start + 1000]

        for sent in (body, chunks()):
            async with client.session.post(
                client.address + "/process", data=sent, headers={"content-type": "application/json"}
            ) as response:
                error = await response.json()
            assert (response.status, error["error"]["type"]) == (413, "BodyTooLarge")
            assert "10000" in error["error"]["message"]
        assert (await client.process("noop"))["status"] == "completed"


async def test_only_json_is_taken(client: Client) -> None:
    for declared in ("text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""):
        status, error = await client.post("/process", json.dumps(JOB).encode(), headers={"content-type": declared})
        assert (status, error["error"]["type"]) == (415, "UnsupportedMedia")
        assert "application/json" in error["error"]["message"]
    status, _ = await client.post(
        "/process", json.dumps(JOB).encode(), headers={"content-type": "Application/JSON; charset=utf-8"}
    )
    assert status == 200


async def test_pages_of_other_sites_command_nothing(client: Client) -> None:
    for path in ("/stop", "/process"):
        status, error = await client.post(path, headers={"origin": "http://evil.example"})
        assert (status, error["error"]["type"]) == (403, "ForeignOrigin")
    status, _ = await client.post("/process", JOB, headers={"origin": client.address})
    assert status == 200


async def test_unknown_paths_and_methods(client: Client) -> None:
    for path in ("/", "/nope", "/jobs/a/b/c", "/process/", "/jobs/"):
        status, error = await client.get(path)
        assert (status, error["error"]["type"]) == (404, "NoSuchPath")
    for method, path, allowed in (("GET", "/process", "POST"), ("POST", "/status", "GET"), ("PUT", "/pools", "PATCH")):
        async with client.session.request(method, client.address + path) as response:
            assert response.headers["allow"] == allowed
            assert (response.status, (await response.json())["error"]["type"]) == (405, "MethodNotAllowed")
    async with client.session.head(client.address + "/status") as response:
        assert response.status == 200


async def test_unknown_jobs(client: Client) -> None:
    for path in ("/jobs/nobody", "/jobs/nobody/events", "/jobs/%00", "/jobs/%ff", "/jobs/a%20b?wait_s=1"):
        status, error = await client.get(path)
        assert (status, error["error"]["type"]) == (404, "JobNotFound")


async def test_bad_queries(client: Client) -> None:
    await client.process("noop", job_id="q")
    for query, field in (("wait_s=x", "wait_s"), ("wait_s=nan", "wait_s"), ("wait_s=-1", "wait_s"),
                         ("wait_s=1&wait_s=2", "wait_s"), ("include=x", "include.0"), ("wait=1", "wait"),
                         ("%ff=1", "\ufffd")):  # fmt: skip
        status, error = await client.get(f"/jobs/q?{query}")
        assert (status, error["error"]["field"]) == (400, field)


async def test_connection_that_breaks_off_in_a_body_harms_nobody(client: Client) -> None:
    host, port = client.address.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /process HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"this is no HTTP\r\n\r\n")
    assert b"400" in await reader.readline()
    writer.close()
    await writer.wait_closed()
    assert (await client.process("noop"))["status"] == "completed"


async def test_full_queue_is_a_429_with_retry_after(serving: Serving) -> None:
    pipeline = {"init": {"workers": 1}, "run": {"workers": 1}, "ready_ahead": 1, "max_queued": 2}
    async with serving(pipeline=pipeline) as client:
        statuses = []
        for number in range(10):
            body = {"task": "slow", "instance": {}, "job_id": f"f{number}"}
            async with client.session.post(client.address + "/jobs", json=body) as response:
                statuses.append(response.status)
                if response.status == 429:
                    assert int(response.headers["retry-after"]) >= 1
                    assert (await response.json())["error"]["type"] == "QueueFull"
    assert 429 in statuses
    assert statuses[0] == 202
