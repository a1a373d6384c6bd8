"""The contract of every dialect, against a scripted engine over real HTTP."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from prorl_gym.backends.base import ContradictoryReply, Dialect, Unreachable
from prorl_gym.backends.dialects import DIALECTS, candidates
from prorl_gym.backends.transport import Endpoint, EngineHttp
from prorl_gym.errors import BackendError, RequestError
from prorl_gym.testing import Reply, ScriptedLlm
from prorl_gym.tokens.records import GenerateParams, VersionSpan

from .conftest import PARAMS, PROMPT

Open = Callable[..., Dialect]


@pytest.fixture(params=sorted(DIALECTS))
async def open_dialect(request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    http = EngineHttp(connect_timeout_s=1.0)

    def open_one(
        address: str, *, model: str | None = None, api_key: str | None = None, call_timeout_s: float = 5.0
    ) -> Dialect:
        endpoint = Endpoint(http, address, call_timeout_s=call_timeout_s, probe_timeout_s=1.0, api_key=api_key)
        return DIALECTS[request.param](endpoint, model)

    yield open_one
    await http.close()


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """Accepts and never answers."""
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        for writer in writers:
            writer.transport.abort()
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def deaf_address() -> AsyncIterator[str]:
    """A port whose queue of connections is full: what knocks there gets no answer at all."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        knocks = [socket.socket() for _ in range(4)]
        for knock in knocks:
            knock.setblocking(False)
            knock.connect_ex(listener.getsockname())
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for knock in knocks:
                knock.close()


async def test_samples_with_the_ids_and_logprobs_that_the_engine_reports(open_dialect: Open) -> None:
    async with ScriptedLlm(Reply(ids=(7, 8, 9), logprobs=(-0.5, -0.25, -1.0), finish_reason="length")) as llm:
        generation = await open_dialect(llm.address).generate(PROMPT, PARAMS, model="scripted")
    assert generation.output_ids == [7, 8, 9]
    assert generation.logprobs == [-0.5, -0.25, -1.0]
    assert generation.finish_reason == "length"
    assert generation.versions == ()
    assert generation.backend == llm.address
    assert 0 < generation.latency_s < 5
    assert list(llm.requests[0].prompt_ids) == PROMPT


async def test_asks_for_what_was_asked_and_leaves_the_rest_to_the_engine(open_dialect: Open) -> None:
    params = GenerateParams(
        max_tokens=5, temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, stop=("END",), stop_token_ids=(4,), seed=11
    )
    async with ScriptedLlm(Reply(text="hi")) as llm:
        dialect = open_dialect(llm.address)
        await dialect.generate(tuple(PROMPT), params, model="scripted")
        await dialect.generate(PROMPT, PARAMS, model="scripted")
    full, bare = llm.requests[0].params, llm.requests[1].params
    for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"):
        assert full[name] == getattr(params, name)
    assert full["stop"] == ["END"]
    assert full["stop_token_ids"] == [4]
    assert not {"top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"} & bare.keys()


async def test_engine_reported_versions_come_along(open_dialect: Open) -> None:
    async with ScriptedLlm(Reply(ids=(7, 8, 9), weight_versions=((3, 0, 2), (4, 2, 3)))) as llm:
        generation = await open_dialect(llm.address).generate(PROMPT, PARAMS, model="scripted")
    assert generation.versions == (VersionSpan(0, 2, 3), VersionSpan(2, 3, 4))


@pytest.mark.parametrize(
    "reply",
    [
        Reply(text="hello world!", fault="short_ids"),
        Reply(text="hello world!", fault="short_logprobs"),
        Reply(text="hello", fault="nan_logprobs"),
        Reply(text="hello", fault="inf_logprobs"),
        Reply(text="hello", fault="null_logprobs"),
        Reply(text="hello", fault="overflow_logprobs"),
        Reply(text="hello", fault="no_logprobs"),
        Reply(text="hello", fault="null_ids"),
        Reply(text="hello", fault="no_choices"),
        Reply(text="hello", fault="not_an_object"),
        Reply(text="hello", fault="invalid_json"),
        Reply(text="hello", finish_reason="tool_calls"),
        Reply(ids=(), finish_reason="stop"),
        Reply(text="x", ids=(7, -8)),
        Reply(text="x", ids=(7, 1 << 31)),
        Reply(ids=(7, 8), logprobs=(-0.1, 0.5)),
        Reply(ids=(7, 8, 9), weight_versions=((3, 0, 2),)),
        Reply(ids=(7, 8, 9), weight_versions=((3, 1, 3),)),
        Reply(ids=(7, 8, 9), weight_versions=((3, 0, 2), (4, 1, 3))),
    ],
    ids=lambda reply: f"{reply.fault or reply.finish_reason}-{reply.ids}-{reply.weight_versions}",
)
async def test_a_reply_that_contradicts_itself_is_none(open_dialect: Open, reply: Reply) -> None:
    async with ScriptedLlm(reply) as llm:
        with pytest.raises(ContradictoryReply):
            await open_dialect(llm.address).generate(PROMPT, PARAMS, model="scripted")


async def test_an_aborted_call_may_hold_no_token(open_dialect: Open) -> None:
    async with ScriptedLlm(Reply(ids=(), finish_reason="abort")) as llm:
        generation = await open_dialect(llm.address).generate(PROMPT, PARAMS, model="scripted")
    assert (generation.output_ids, generation.logprobs, generation.finish_reason) == ([], [], "abort")


async def test_errors_of_the_engine_say_so_and_whether_to_retry(open_dialect: Open) -> None:
    for status, retryable in ((500, True), (503, True), (429, True), (400, False), (404, False), (401, False)):
        async with ScriptedLlm(Reply(fault="status", status=status)) as llm:
            with pytest.raises(BackendError, match=f"HTTP {status}.*scripted fault") as caught:
                await open_dialect(llm.address).generate(PROMPT, PARAMS, model="scripted")
        assert caught.value.retryable is retryable


@pytest.mark.parametrize("fault", ["refuse", "die_mid_body"])
async def test_a_connection_that_breaks_off_is_retryable(open_dialect: Open, fault: str) -> None:
    async with ScriptedLlm(Reply(text="hello", fault=fault)) as llm:  # type: ignore[arg-type]
        with pytest.raises(BackendError, match="broke off") as caught:
            await open_dialect(llm.address).generate(PROMPT, PARAMS, model="scripted")
    assert caught.value.retryable
    assert not isinstance(caught.value, Unreachable)


async def test_closed_port_deaf_port_and_unknown_host_are_unreachable_within_the_connect_timeout(
    open_dialect: Open,
) -> None:
    async with ScriptedLlm(Reply()) as llm:
        closed = llm.address
    async with deaf_address() as deaf:
        for address in (closed, deaf, "http://no-such-host.invalid:1"):
            began = time.monotonic()
            with pytest.raises(Unreachable):
                await open_dialect(address).generate(PROMPT, PARAMS, model="scripted")
            assert time.monotonic() - began < 3


async def test_an_engine_that_accepts_and_never_answers_ends_at_the_deadline(open_dialect: Open) -> None:
    async with silent_server() as address:
        dialect = open_dialect(address, call_timeout_s=0.3)
        began = time.monotonic()
        with pytest.raises(BackendError, match=r"within 0\.3 s") as caught:
            await dialect.generate(PROMPT, PARAMS, model="m")
        assert time.monotonic() - began < 2
        assert not caught.value.retryable
        assert not await dialect.healthy()


async def test_cancelling_closes_the_connection_within_a_second(open_dialect: Open) -> None:
    async with ScriptedLlm(Reply(text="never", hold=True)) as llm:
        call = asyncio.create_task(open_dialect(llm.address).generate(PROMPT, PARAMS, model="scripted"))
        await llm.until(lambda server: server.in_flight == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await llm.until(lambda server: server.requests[0].closed_after_s is not None, timeout_s=1.0)


async def test_300_calls_are_in_flight_at_once(open_dialect: Open) -> None:
    async with ScriptedLlm(Reply(text="ok", hold=True)) as llm:
        dialect = open_dialect(llm.address, call_timeout_s=30)
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(dialect.generate(PROMPT, PARAMS, model="scripted")) for _ in range(300)]
            await llm.until(lambda server: server.in_flight == 300)
            llm.release()
        assert all(call.result().output_ids for call in calls)


async def test_probe_tells_model_and_length(open_dialect: Open) -> None:
    async with ScriptedLlm(Reply(), model="qwen", max_model_len=777) as llm:
        facts = await open_dialect(llm.address).probe()
        assert (facts.model, facts.max_model_len) == ("qwen", 777)
        assert (await open_dialect(llm.address, model="qwen").probe()).model == "qwen"
        with pytest.raises(BackendError, match=r"'qwen'.*not 'other'"):
            await open_dialect(llm.address, model="other").probe()


async def test_health_follows_the_engine(open_dialect: Open) -> None:
    async with ScriptedLlm(Reply()) as llm:
        dialect = open_dialect(llm.address)
        assert await dialect.healthy()
        llm.healthy = False
        assert not await dialect.healthy()
    assert not await dialect.healthy()


async def test_the_key_is_sent_and_shown_nowhere(open_dialect: Open) -> None:
    async with ScriptedLlm(Reply(text="ok"), api_key="s3cret") as llm:
        dialect = open_dialect(llm.address, api_key="s3cret")
        await dialect.probe()
        assert (await dialect.generate(PROMPT, PARAMS, model="scripted")).output_ids
        with pytest.raises(BackendError, match="401") as caught:
            await open_dialect(llm.address, api_key="wr0ng").generate(PROMPT, PARAMS, model="scripted")
    assert "wr0ng" not in str(caught.value)
    assert "s3cret" not in repr(Endpoint(EngineHttp(1.0), "http://n1", 1.0, 1.0, "s3cret"))


async def test_environment_proxies_are_ignored(open_dialect: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    async with ScriptedLlm(Reply(text="ok")) as llm:
        assert (await open_dialect(llm.address).generate(PROMPT, PARAMS, model="scripted")).output_ids


async def test_small_packets_leave_at_once(open_dialect: Open) -> None:
    """With Nagle's algorithm on, a kept-alive call costs the 40 ms of a delayed acknowledgement."""
    async with ScriptedLlm(Reply(text="ok")) as llm:
        dialect = open_dialect(llm.address)
        await dialect.generate(PROMPT, PARAMS, model="scripted")
        session = dialect._endpoint.http._session  # type: ignore[attr-defined]
        sockets = [
            protocol.transport.get_extra_info("socket")
            for connections in session.connector._conns.values()
            for protocol, _ in connections
        ]
        assert sockets
        assert all(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in sockets)


def test_an_unknown_dialect_is_refused_by_field() -> None:
    endpoint = Endpoint(EngineHttp(1.0), "http://n1", 1.0, 1.0)
    with pytest.raises(RequestError, match="known: auto, vllm") as caught:
        candidates("sglang2", endpoint, None)
    assert caught.value.field == "dialect"
