"""The client against a small real server, faults included."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from prorl_gym import errors
from prorl_gym.client import RolloutClient
from prorl_gym.errors import (
    ConfigError,
    JobNotFound,
    NoSuchPath,
    QueueFull,
    RequestError,
    ServiceError,
    ServiceUnreachable,
    Unauthorized,
)
from prorl_gym.types import JobStatus, SamplingParams

from .stand_in import StandIn, refusal


async def until(condition: Any, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_process_submits_once_and_polls_to_the_result() -> None:
    async with StandIn() as service, RolloutClient(service.address + "/") as client:
        call = asyncio.create_task(
            client.process(
                {"question": "2+2"},
                task="math",
                sampling_params={"temperature": 0.5, "max_output_tokens": 7},
                timeout_s=9,
                group_id="g",
                priority=3,
                policy="mine",
            )
        )
        await until(lambda: service.waiting == 1)
        assert not call.done()
        service.finished.set()
        result = await call
    (job_id,) = service.jobs
    assert job_id == result.job_id
    assert job_id.startswith(client.run_id)
    assert (result.status, result.reward, result.messages[0].content) == (JobStatus.COMPLETED, 1.0, "4" * 5000)
    body = service.jobs[job_id]
    assert body["sampling_params"] == {"temperature": 0.5, "max_tokens": 7}
    assert (body["task"], body["timeout_s"], body["group_id"], body["priority"]) == ("math", 9, "g", 3)
    assert (body["policy"], body["instance"]) == ("mine", {"question": "2+2"})
    assert service.queries[0]["include"] == "messages,segments"
    assert 0 < float(service.queries[0]["wait_s"]) <= 60
    assert service.calls["POST /jobs"] == 1


async def test_ids_are_new_for_each_client_and_job() -> None:
    async with StandIn() as service:
        service.finished.set()
        for _ in range(2):
            async with RolloutClient(service.address) as client:
                await asyncio.gather(*(client.process({"question": "same"}) for _ in range(3)))
                await client.process({"question": "same"}, job_id="my-own")
    assert len(service.jobs) == 7


async def test_512_process_calls_are_open_at_once() -> None:
    async with StandIn() as service, RolloutClient(service.address) as client:
        calls = [asyncio.create_task(client.process({"n": n})) for n in range(512)]
        await until(lambda: service.waiting == 512, timeout_s=30)
        service.finished.set()
        results = await asyncio.gather(*calls)
    assert len({result.job_id for result in results}) == 512
    assert service.most_waiting == 512


async def test_rows_of_a_trainer_are_sent_as_json() -> None:
    row = {
        "answer": np.int64(4),
        "scores": np.array([1.5, 2.5]),
        "text": "lone \ud800 surrogate, NUL \x00",
        "nested": [{"x": np.float32(0.5)}],
    }
    async with StandIn() as service, RolloutClient(service.address) as client:
        service.finished.set()
        result = await client.process(row)
    sent = service.jobs[result.job_id]["instance"]
    assert sent == {**row, "answer": 4, "scores": [1.5, 2.5], "nested": [{"x": 0.5}]}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"sampling_params": {"top_q": 1}}, "sampling_params.top_q"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"job_id": "a b"}, "job_id"),
        ({"instance": {"x": float("nan")}}, None),
        ({"instance": {"x": object()}}, None),
    ],
)
async def test_wrong_arguments_are_refused_before_anything_is_sent(
    arguments: dict[str, Any], field: str | None
) -> None:
    async with StandIn() as service, RolloutClient(service.address) as client:
        with pytest.raises(RequestError) as caught:
            await client.process(**{"instance": {}, **arguments})
    assert caught.value.field == field
    assert not service.calls


async def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        RolloutClient("localhost:8006")


# -- errors and retries -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "UnknownTask",
        "Unauthorized",
        "ForeignOrigin",
        "NoSuchPath",
        "JobNotFound",
        "MethodNotAllowed",
        "DuplicateJob",
        "BodyTooLarge",
        "UnsupportedMedia",
        "NotRunning",
    ],
)
async def test_refusals_come_as_the_error_that_the_service_named(kind: str) -> None:
    named: type[RequestError] = getattr(errors, kind)
    async with StandIn() as service, RolloutClient(service.address) as client:
        service.answers["POST /jobs"] = [refusal(named.status, kind, "known: math")]
        with pytest.raises(named, match="known: math") as caught:
            await client.process({})
    assert type(caught.value) is named
    assert caught.value.field == "f"
    assert service.calls["POST /jobs"] == 1


async def test_other_refusals_and_internal_errors_are_told_apart() -> None:
    async with StandIn() as service, RolloutClient(service.address) as client:
        with pytest.raises(NoSuchPath, match="nothing is served there"):
            await client.environments()
        service.answers["GET /environments"] = [refusal(451, "FromTheFuture", "not here")]
        with pytest.raises(RequestError, match="FromTheFuture: not here"):
            await client.environments()
        service.answers["GET /status"] = [refusal(500, "InternalError", "oops"), (200, "<html>", {}), (200, [1], {})]
        for _ in range(3):
            with pytest.raises(ServiceError) as caught:
                await client.status()
            assert not isinstance(caught.value, ServiceUnreachable)


async def test_a_broken_connection_is_retried_with_the_same_job_id() -> None:
    async with StandIn() as service, RolloutClient(service.address) as client:
        service.finished.set()
        service.answers["POST /jobs"] = [None, (502, "bad gateway", {}), None]
        result = await client.process({})
    assert [body["job_id"] for name, body in service.bodies if name == "POST /jobs"] == [result.job_id] * 4
    assert len(service.jobs) == 1


async def test_a_full_queue_is_asked_again_after_the_time_it_says_and_then_raised() -> None:
    full = refusal(429, "QueueFull", **{"Retry-After": "1"})
    async with StandIn() as service:
        service.finished.set()
        service.answers["POST /jobs"] = [full]
        async with RolloutClient(service.address) as client:
            began = time.monotonic()
            await client.process({})
            assert time.monotonic() - began >= 1
        service.answers["POST /jobs"] = [full]
        async with RolloutClient(service.address, retry_for_s=0.5) as client:
            with pytest.raises(QueueFull) as caught:
                await client.process({})
    assert caught.value.retry_after_s == 1


async def test_a_service_that_is_gone_is_unreachable_within_the_bound() -> None:
    async with StandIn() as service:
        pass
    async with RolloutClient(service.address, retry_for_s=0.3) as client:
        began = time.monotonic()
        with pytest.raises(ServiceUnreachable, match=service.address):
            await client.health()
        assert time.monotonic() - began < 2


async def test_a_restarted_service_does_not_know_the_job() -> None:
    first, second = StandIn(), StandIn()
    async with first, RolloutClient(first.address) as client:
        call = asyncio.create_task(client.process({}))
        await until(lambda: first.waiting == 1)
        second.port = first.port
        await first.stop()
        async with second:
            with pytest.raises(JobNotFound):
                await call


async def test_the_token_is_sent() -> None:
    async with StandIn(token="s3cret") as service:
        service.finished.set()
        async with RolloutClient(service.address, token="s3cret") as client:
            assert (await client.process({})).reward == 1.0
        async with RolloutClient(service.address, token="wrong") as client:
            with pytest.raises(Unauthorized):
                await client.process({})


async def test_environment_proxies_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    async with StandIn() as service, RolloutClient(service.address, retry_for_s=0) as client:
        service.finished.set()
        assert (await client.process({})).reward == 1.0


async def test_gzip_is_asked_for_unless_told_otherwise() -> None:
    async with StandIn() as service:
        service.finished.set()
        for compress, expected in ((True, "gzip"), (False, "identity")):
            async with RolloutClient(service.address, compress=compress) as client:
                assert (await client.process({})).messages[0].content == "4" * 5000
            assert service.headers[-1]["Accept-Encoding"] == expected


# -- waiting, cancelling, following -----------------------------------------------------------------------------------


async def test_polls_go_on_until_the_job_ends_and_wait_has_its_own_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.client.rollout_client.POLL_S", 0.05)
    async with StandIn() as service, RolloutClient(service.address) as client:
        call = asyncio.create_task(client.process({}))
        await until(lambda: len(service.queries) >= 3)
        (job_id,) = service.jobs
        with pytest.raises(TimeoutError):
            await client.wait(job_id, timeout_s=0.1)
        assert (await client.get(job_id)).status is JobStatus.RUN
        service.finished.set()
        assert (await call).job_id == job_id
        assert (await client.wait(job_id, timeout_s=5)).job_id == job_id


async def test_cancelling_a_process_call_cancels_its_job_unless_told_otherwise() -> None:
    async with StandIn() as service, RolloutClient(service.address) as client:
        for job_id, cancel_job in (("ends", True), ("goes-on", False)):
            call = asyncio.create_task(client.process({}, job_id=job_id, cancel_job=cancel_job))
            await until(lambda job_id=job_id: service.waiting == 1 and job_id in service.jobs)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(lambda: service.waiting == 0)
        assert service.cancelled == ["ends"]


async def test_cancel_by_what_is_named() -> None:
    async with StandIn() as service, RolloutClient(service.address) as client:
        for _ in range(2):
            call = asyncio.create_task(client.process({}))
            await until(lambda: service.waiting >= 1)
            call.cancel()
        report = await client.cancel(prefix=client.run_id)
        assert sorted(report.cancelled) == sorted(service.jobs)
        await client.cancel("a", job_ids=["b"], group_id="g")
        assert service.bodies[-1][1] == {"job_id": "a", "job_ids": ["b"], "group_id": "g"}


async def test_events_are_followed_to_the_end_over_a_broken_connection() -> None:
    async with StandIn() as service, RolloutClient(service.address) as client:
        events = [event async for event in client.events("job")]
        assert [(event.seq, event.event) for event in events] == [
            (1, "queued"),
            (2, "init"),
            (3, "run"),
            (4, "tool\u2028call"),
            (5, "completed"),
        ]
        assert events[3].fields == {"turn": 4}
        assert [event.seq async for event in client.events("job", after=3)] == [4, 5]
        service.answers["GET /jobs/unknown/events"] = [refusal(404, "JobNotFound")]
        with pytest.raises(JobNotFound):
            await anext(client.events("unknown"))


async def test_control_calls_say_what_should_be() -> None:
    server = {"address": "http://n1:8000", "healthy": True, "policy_version": 4}
    state = {"status": "running", "instance_id": "i"}
    async with StandIn() as service, RolloutClient(service.address) as client:
        service.answers = {
            "POST /add_llm_server": [(200, server, {})],
            "POST /clear_llm_server": [(200, [server], {})],
            "POST /remove_llm_server": [(200, {"removed": True}, {})],
            "GET /llm_servers": [(200, [server], {})],
            "PATCH /pools": [(200, {"run": {"size": 9}}, {})],
            "POST /start": [(200, state, {})],
            "POST /stop": [(200, state, {}), (200, state, {})],
            "GET /health": [(200, state, {})],
            "GET /status": [(200, {**state, "jobs": {"run": 2}, "llm_servers": [server]}, {})],
            "GET /environments": [(200, {"tasks": ["math_agent"], "environments": []}, {})],
        }
        assert (await client.add_llm_server("http://n1:8000/v1", policy_version=4)).healthy
        assert (await client.clear_llm_server(in_flight="park"))[0].policy_version == 4
        assert await client.remove_llm_server("http://n1:8000", policy="mine")
        assert (await client.llm_servers())[0].address == "http://n1:8000"
        assert await client.resize_pools(run=9) == {"run": {"size": 9}}
        assert (await client.start()).instance_id == "i"
        assert (await client.stop(drain=True, deadline_s=2)).status == "running"
        await client.stop(exit=True)
        assert (await client.health()).status == "running"
        assert (await client.status()).jobs == {"run": 2}
        assert (await client.environments()).tasks == ["math_agent"]
    assert service.bodies == [
        ("POST /add_llm_server", {"address": "http://n1:8000/v1", "policy": "default", "policy_version": 4}),
        ("POST /clear_llm_server", {"policy": "default", "in_flight": "park"}),
        ("POST /remove_llm_server", {"address": "http://n1:8000", "policy": "mine"}),
        ("PATCH /pools", {"run": 9}),
        ("POST /start", {}),
        ("POST /stop", {"drain": True, "exit": False, "deadline_s": 2}),
        ("POST /stop", {"drain": False, "exit": True}),
    ]


async def test_sampling_params_may_be_typed() -> None:
    async with StandIn() as service, RolloutClient(service.address) as client:
        service.finished.set()
        result = await client.process({}, sampling_params=SamplingParams(seed=1), return_ledger=True)
    assert service.jobs[result.job_id]["sampling_params"] == {"seed": 1}
    assert service.queries[0]["include"] == "messages,segments,ledger"


# -- weight -----------------------------------------------------------------------------------------------------------


def test_importing_the_client_is_quick_and_light() -> None:
    program = (
        "import time; began = time.process_time(); import prorl_gym.client; took = time.process_time() - began\n"
        "import json, sys; print(json.dumps([took, sorted({name.split('.')[0] for name in sys.modules})]))"
    )
    best, modules = min(
        json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout)
        for _ in range(3)
    )
    assert best < 0.5
    assert not {"aiohttp", "fastapi", "torch", "transformers", "omegaconf", "hydra", "orjson", "numpy"} & set(modules)
