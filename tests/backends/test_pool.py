"""The pool as a task sees it: routing, stickiness, swaps, failures."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from prorl_gym.backends.base import LlmSession
from prorl_gym.backends.pool import BackendPool
from prorl_gym.errors import BackendError, NotRunning, RequestError
from prorl_gym.testing import Reply, ScriptedLlm
from prorl_gym.tokens.records import GenerateParams, Generation, VersionSpan

from .conftest import PARAMS, PROMPT, Waits, until

MakePool = Callable[..., BackendPool]


async def engines(stack: AsyncExitStack, count: int, reply: Reply | None = None) -> list[ScriptedLlm]:
    return [await stack.enter_async_context(ScriptedLlm(reply or Reply(text="ok"))) for _ in range(count)]


def in_flight(pool: BackendPool) -> dict[str, int]:
    return {server.address: server.in_flight for server in pool.servers()}


async def one_call(pool: BackendPool, waits: Waits, key: str = "job") -> Generation:
    async with pool.session(key, waits) as session:
        return await session.generate(PROMPT, PARAMS)


# -- registration -----------------------------------------------------------------------------------------------------


async def test_add_says_what_the_engine_is(make_pool: MakePool) -> None:
    pool = make_pool()
    async with ScriptedLlm(Reply(), model="qwen", max_model_len=512) as llm:
        server = await pool.add(llm.address + "/v1/", policy_version=3)
    assert server.address == llm.address
    assert (server.healthy, server.detail, server.dialect) == (True, None, "vllm")
    assert (server.model, server.max_model_len, server.policy_version, server.policy) == ("qwen", 512, 3, "default")
    assert [one.address for one in pool.servers()] == [llm.address]


async def test_an_engine_that_does_not_answer_is_kept_and_used_once_it_does(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool(unhealthy_wait_s=10)
    async with ScriptedLlm(Reply(text="ok")) as llm:
        await llm.stop()
        server = await pool.add(llm.address)
        assert not server.healthy
        assert server.detail
        assert "no connection" in server.detail
        call = asyncio.create_task(one_call(pool, waits))
        await asyncio.sleep(0)
        await llm.start()
        assert (await call).output_ids
        assert pool.servers()[0].healthy
    assert waits.reasons == []  # registered but dead: the job's timer runs


async def test_the_same_address_again_renews_version_and_model(make_pool: MakePool) -> None:
    pool = make_pool()
    async with ScriptedLlm(Reply(), model="a") as llm:
        await pool.add(llm.address, policy_version=1)
        llm.model = "b"
        server = await pool.add(llm.address + "/v1", policy_version=2)
    assert (server.policy_version, server.model) == (2, "b")
    assert len(pool.servers()) == 1


async def test_wrong_registrations_are_refused_by_field_and_change_nothing(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(api_key_envs=("NO_SUCH_KEY",))
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for field, arguments in (
        ("address", {"address": "n1:8000"}),
        ("dialect", {"address": "http://n1:8000", "dialect": "grpc"}),
        ("api_key_env", {"address": "http://n1:8000", "api_key_env": "NO_SUCH_KEY"}),
    ):
        with pytest.raises(RequestError) as caught:
            await pool.add(**arguments)  # type: ignore[arg-type]
        assert caught.value.field == field
    with pytest.raises(RequestError):
        await pool.remove("nonsense")
    assert pool.servers() == []


async def test_the_key_comes_from_the_named_variable(
    make_pool: MakePool, waits: Waits, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setenv("ENGINE_KEY", "s3cret")
    async with ScriptedLlm(Reply(text="ok"), api_key="s3cret") as llm:
        pool = make_pool(api_key_env="ENGINE_KEY")
        assert (await pool.add(llm.address)).healthy
        assert (await one_call(pool, waits)).output_ids
        assert not (await make_pool().add(llm.address)).healthy
    assert "s3cret" not in caplog.text


async def test_no_variable_leaves_the_environment_that_the_configuration_does_not_list(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HUB_TOKEN", "FIRST_KEY", "SECOND_KEY"):
        monkeypatch.setenv(name, f"value-of-{name}")
    pool = make_pool(api_key_env="FIRST_KEY", api_key_envs=("SECOND_KEY",))
    async with ScriptedLlm(Reply(), api_key="value-of-SECOND_KEY") as llm:
        for refused in ("HUB_TOKEN", "UNSET_VARIABLE", "first_key"):
            with pytest.raises(RequestError, match=r"backend\.api_key_envs") as caught:
                await pool.add(llm.address, api_key_env=refused)
            assert caught.value.field == "api_key_env"
        assert pool.servers() == []
        assert not (await pool.add(llm.address, api_key_env="FIRST_KEY")).healthy
        assert (await pool.add(llm.address, api_key_env="SECOND_KEY")).healthy


async def test_a_stopped_pool_takes_no_backend_and_ends_its_calls(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with ScriptedLlm(Reply(hold=True)) as llm:
        await pool.add(llm.address)
        call = asyncio.create_task(one_call(pool, waits))
        await llm.until(lambda server: server.in_flight == 1)
        await pool.stop()
        with pytest.raises(BackendError, match="stops"):
            await call
        with pytest.raises(NotRunning):
            await pool.add(llm.address)
        await pool.stop()
        await pool.start()
        assert (await pool.add(llm.address)).healthy


# -- routing ----------------------------------------------------------------------------------------------------------


async def test_new_tasks_go_where_the_fewest_are_in_flight(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with AsyncExitStack() as stack:
        first, second = await engines(stack, 2)
        await pool.add(first.address)
        await pool.add(second.address)
        for key in range(6):
            await stack.enter_async_context(pool.session(str(key), waits))
        assert in_flight(pool) == {first.address: 3, second.address: 3}
        third = await stack.enter_async_context(ScriptedLlm(Reply()))
        await pool.add(third.address)
        assert pool.servers()[2].assigned == 3  # as many as the others, not 0
        for key in range(6, 9):
            await stack.enter_async_context(pool.session(str(key), waits))
        assert in_flight(pool) == {first.address: 3, second.address: 3, third.address: 3}
    assert set(in_flight(pool).values()) == {0}


async def test_least_in_flight_breaks_ties_by_tasks_assigned(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with AsyncExitStack() as stack:
        for llm in await engines(stack, 3):
            await pool.add(llm.address)
        for key in range(9):  # one after the other: nothing is in flight when the next one comes
            await one_call(pool, waits, str(key))
        assert [server.assigned for server in pool.servers()] == [3, 3, 3]


async def test_least_assigned_counts_since_registration_and_a_late_one_starts_level(
    make_pool: MakePool, waits: Waits
) -> None:
    pool = make_pool(routing="least_assigned")
    async with AsyncExitStack() as stack:
        first, second, third = await engines(stack, 3)
        await pool.add(first.address)
        await stack.enter_async_context(pool.session("a", waits))
        await one_call(pool, waits, "b")
        await pool.add(second.address)
        await pool.add(third.address)
        assert [server.assigned for server in pool.servers()] == [2, 2, 2]
        for key in range(6):
            await one_call(pool, waits, str(key))
        assert [server.assigned for server in pool.servers()] == [4, 4, 4]


async def test_every_turn_of_a_task_goes_to_one_backend(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with AsyncExitStack() as stack:
        llms = await engines(stack, 3)
        for llm in llms:
            await pool.add(llm.address)

        async def task(key: int) -> set[str]:
            async with pool.session(str(key), waits) as session:
                prompts = [[key + 1] * turn for turn in range(1, 5)]
                return {(await session.generate(prompt, PARAMS)).backend for prompt in prompts}

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(task(key)) for key in range(12)]
    assert all(len(one.result()) == 1 for one in tasks)
    assert [len(llm.requests) for llm in llms] == [16, 16, 16]


async def test_sessions_of_one_task_share_its_backend(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with AsyncExitStack() as stack:
        for llm in await engines(stack, 2):
            await pool.add(llm.address)
        async with pool.session("job", waits) as one, pool.session("job", waits) as other:
            generations = [await session.generate(PROMPT, PARAMS) for session in (one, other)]
            assert sum(in_flight(pool).values()) == 1
    assert generations[0].backend == generations[1].backend


async def test_300_calls_of_300_tasks_are_in_flight_at_once(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with ScriptedLlm(Reply(text="ok", hold=True)) as llm:
        await pool.add(llm.address)
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(one_call(pool, waits, str(key))) for key in range(300)]
            await llm.until(lambda server: server.in_flight == 300)
            assert pool.calls_in_flight == 300
            llm.release()
    assert all(call.result().output_ids for call in calls)
    assert pool.calls_in_flight == 0


async def test_a_configured_limit_per_backend_holds(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool(max_calls_per_backend=4)
    async with ScriptedLlm(Reply(text="ok", delay_s=0.02)) as llm:
        await pool.add(llm.address)
        async with asyncio.TaskGroup() as group:
            for key in range(20):
                group.create_task(one_call(pool, waits, str(key)))
        assert llm.max_in_flight == 4
        assert len(llm.requests) == 20


async def test_a_session_says_model_and_length(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with ScriptedLlm(Reply(), model="m", max_model_len=99) as llm:
        await pool.add(llm.address)
        async with pool.session("job", waits) as session:
            assert (session.model, session.max_model_len) == ("m", 99)


# -- waiting for a backend --------------------------------------------------------------------------------------------


async def test_tasks_wait_for_the_first_add_with_the_timer_paused_and_spread(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with AsyncExitStack() as stack:
        llms = await engines(stack, 3)
        async with asyncio.TaskGroup() as group:
            facts = group.create_task(pool.first_facts(waits))
            calls = [group.create_task(one_call(pool, waits, str(key))) for key in range(30)]
            await until(lambda: len(waits.reasons) == 31)
            assert waits.paused
            for llm in llms:
                await pool.add(llm.address)
        assert facts.result().model == "scripted"
        assert all(call.result().retries == () for call in calls)
        assert [len(llm.requests) for llm in llms] == [10, 10, 10]
    assert not waits.paused


async def test_waiting_for_an_add_has_a_bound(make_pool: MakePool, waits: Waits) -> None:
    with pytest.raises(BackendError, match=r"no backend was registered for policy 'default' within 0\.1 s"):
        await one_call(make_pool(wait_s=0.1), waits)


async def test_backends_that_are_all_dead_end_the_call_within_the_bound_and_pause_nothing(
    make_pool: MakePool, waits: Waits
) -> None:
    pool = make_pool(unhealthy_wait_s=0.5)
    async with ScriptedLlm(Reply()) as llm:
        pass
    await pool.add(llm.address)
    began = time.monotonic()
    with pytest.raises(BackendError, match=r"no backend .* is healthy: http://.*no connection"):
        await one_call(pool, waits)
    assert 0.4 < time.monotonic() - began < 3
    assert waits.reasons == []


async def test_cancelling_a_wait_leaves_nothing_behind(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    call = asyncio.create_task(one_call(pool, waits))
    await until(lambda: waits.paused)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not waits.paused
    async with ScriptedLlm(Reply()) as llm:
        await pool.add(llm.address)
        assert pool.servers()[0].in_flight == 0


# -- swaps ------------------------------------------------------------------------------------------------------------


async def test_calls_are_stamped_with_the_version_at_their_start(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with ScriptedLlm(Reply(ids=(7, 8), hold=True)) as llm:
        await pool.add(llm.address, policy_version=1)
        async with pool.session("job", waits) as session:
            first = asyncio.create_task(session.generate([1], PARAMS))
            await llm.until(lambda server: server.in_flight == 1)
            await pool.add(llm.address, policy_version=2)
            llm.release()
            assert (await first).versions == (VersionSpan(0, 2, 1),)
            second = asyncio.create_task(session.generate([2], PARAMS))
            await llm.until(lambda server: server.in_flight == 1)
            llm.release()
            assert (await second).versions == (VersionSpan(0, 2, 2),)


async def test_the_engines_own_report_of_versions_wins(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with ScriptedLlm(Reply(ids=(7, 8), weight_versions=((5, 0, 1), (6, 1, 2)))) as llm:
        await pool.add(llm.address, policy_version=1)
        assert (await one_call(pool, waits)).versions == (VersionSpan(0, 1, 5), VersionSpan(1, 2, 6))


async def test_clear_continue_keeps_old_tasks_and_sends_new_ones_to_new_backends(
    make_pool: MakePool, waits: Waits
) -> None:
    pool = make_pool()
    async with AsyncExitStack() as stack:
        old, new = await engines(stack, 2)
        await pool.add(old.address, policy_version=1)
        async with pool.session("old", waits) as session:
            await session.generate([1], PARAMS)
            await pool.clear()
            assert pool.servers() == []
            assert (await session.generate([1, 2], PARAMS)).backend == old.address  # without waiting
            assert waits.reasons == []
            await pool.add(new.address, policy_version=2)
            assert (await one_call(pool, waits, "new")).backend == new.address
            still = await session.generate([1, 2, 3], PARAMS)
            assert (still.backend, still.versions[0].version, still.retries) == (old.address, 1, ())


async def test_clear_and_add_of_the_same_address_keeps_its_tasks(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with AsyncExitStack() as stack:
        first, second = await engines(stack, 2)
        await pool.add(first.address, policy_version=1)
        await pool.add(second.address, policy_version=1)
        sessions = [await stack.enter_async_context(pool.session(str(key), waits)) for key in range(4)]
        homes = [(await session.generate([1], PARAMS)).backend for session in sessions]
        for mode in ("continue", "park", "abort"):
            await pool.clear(mode)  # type: ignore[arg-type]
            await pool.add(second.address, policy_version=2)
            await pool.add(first.address, policy_version=2)
            generations = [await session.generate([1, 2], PARAMS) for session in sessions]
            assert [generation.backend for generation in generations] == homes
            assert {generation.versions[0].version for generation in generations} == {2}
            assert in_flight(pool) == {second.address: 2, first.address: 2}


async def test_clear_park_drains_and_next_calls_wait_with_the_timer_paused(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with ScriptedLlm(Reply(ids=(7,), hold=True)) as llm:
        await pool.add(llm.address, policy_version=1)
        async with pool.session("job", waits) as session:
            call = asyncio.create_task(session.generate([1], PARAMS))
            await llm.until(lambda server: server.in_flight == 1)
            clear = asyncio.create_task(pool.clear("park"))
            await asyncio.sleep(0)
            assert pool.servers() == []
            assert not clear.done()
            assert pool.calls_in_flight == 1
            llm.release()
            assert (await call).versions == (VersionSpan(0, 1, 1),)
            await clear
            call = asyncio.create_task(session.generate([1, 7], PARAMS))
            await until(lambda: waits.paused)
            assert len(llm.requests) == 1
            await pool.add(llm.address, policy_version=2)
            await llm.until(lambda server: server.in_flight == 1)
            llm.release()
            assert (await call).versions == (VersionSpan(0, 1, 2),)


async def test_an_engine_abort_while_parked_goes_on_after_the_next_add(make_pool: MakePool, waits: Waits) -> None:
    """How a trainer swaps weights at once and loses no token: park, have the engine abort, load, add."""
    pool = make_pool()
    replies = [Reply(ids=(7, 8), hold=True, finish_reason="abort"), Reply(ids=(9,))]
    async with ScriptedLlm(replies) as llm:
        await pool.add(llm.address, policy_version=1)
        call = asyncio.create_task(one_call(pool, waits))
        await llm.until(lambda server: server.in_flight == 1)
        clear = asyncio.create_task(pool.clear("park"))
        await asyncio.sleep(0)
        llm.release()
        await clear
        await until(lambda: waits.paused)
        await pool.add(llm.address, policy_version=2)
        generation = await call
    assert generation.output_ids == [7, 8, 9]
    assert generation.versions == (VersionSpan(0, 2, 1), VersionSpan(2, 3, 2))
    assert list(llm.requests[1].prompt_ids) == [*PROMPT, 7, 8]


async def test_clear_park_sends_nothing_that_waited_for_a_slot(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool(max_calls_per_backend=1)
    async with ScriptedLlm(Reply(ids=(7,), hold=True)) as llm:
        await pool.add(llm.address)
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(one_call(pool, waits, str(key))) for key in range(3)]
            await llm.until(lambda server: server.in_flight == 1)
            clear = group.create_task(pool.clear("park"))
            await until(lambda: len(waits.reasons) == 2)
            llm.release()
            await clear
            assert len(llm.requests) == 1
            await pool.add(llm.address)
            for seen in (2, 3):
                await llm.until(lambda server, seen=seen: len(server.requests) == seen)  # type: ignore[misc]
                llm.release()
        assert all(call.result().output_ids == [7] for call in calls)


async def test_clear_abort_cuts_calls_whose_tasks_go_on_after_the_next_add(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with AsyncExitStack() as stack:
        (old,) = await engines(stack, 1, Reply(ids=(7,), hold=True))
        (new,) = await engines(stack, 1, Reply(ids=(9,)))
        await pool.add(old.address, policy_version=1)
        call = asyncio.create_task(one_call(pool, waits))
        await old.until(lambda server: server.in_flight == 1)
        await pool.clear("abort")
        await old.until(lambda server: server.requests[0].closed_after_s is not None, timeout_s=1.0)
        await until(lambda: waits.paused)
        await pool.add(new.address, policy_version=2)
        generation = await call
    assert generation.output_ids == [9]
    assert generation.versions == (VersionSpan(0, 1, 2),)
    assert any("cleared" in line for line in generation.retries)
    assert f"moved from {old.address} to {new.address}" in generation.retries


async def test_an_engine_abort_goes_on_from_prompt_and_partial_ids_with_version_spans(
    make_pool: MakePool, waits: Waits
) -> None:
    pool = make_pool()
    replies = [
        Reply(ids=(7, 8), logprobs=(-0.1, -0.2), finish_reason="abort"),
        Reply(ids=(9,), logprobs=(-0.3,), hold=True, finish_reason="abort"),
        Reply(ids=(10,), logprobs=(-0.4,), finish_reason="stop"),
    ]
    async with ScriptedLlm(replies) as llm:
        await pool.add(llm.address, policy_version=1)
        async with pool.session("job", waits) as session:
            call = asyncio.create_task(session.generate(PROMPT, GenerateParams(max_tokens=6, seed=100)))
            await llm.until(lambda server: server.in_flight == 1 and len(server.requests) == 2)
            await pool.add(llm.address, policy_version=2)
            llm.release()
            generation = await call
    assert generation.output_ids == [7, 8, 9, 10]
    assert generation.logprobs == [-0.1, -0.2, -0.3, -0.4]
    assert generation.versions == (VersionSpan(0, 3, 1), VersionSpan(3, 4, 2))
    assert generation.finish_reason == "stop"
    assert [list(request.prompt_ids) for request in llm.requests] == [PROMPT, [*PROMPT, 7, 8], [*PROMPT, 7, 8, 9]]
    assert [request.params["max_tokens"] for request in llm.requests] == [6, 4, 3]
    assert len({request.params["seed"] for request in llm.requests}) == 3


async def test_an_abort_at_the_token_limit_is_a_length_stop(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with ScriptedLlm(Reply(ids=(7, 8), finish_reason="abort")) as llm:
        await pool.add(llm.address)
        async with pool.session("job", waits) as session:
            generation = await session.generate(PROMPT, GenerateParams(max_tokens=2))
    assert (generation.output_ids, generation.finish_reason) == ([7, 8], "length")
    assert len(llm.requests) == 1


async def test_an_engine_that_only_aborts_ends_the_call(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool(unhealthy_wait_s=0.4)
    async with ScriptedLlm(Reply(ids=(), finish_reason="abort")) as llm:
        await pool.add(llm.address)
        with pytest.raises(BackendError, match="aborted by the engine after 0 tokens"):
            await one_call(pool, waits)
        assert len(llm.requests) < 10


async def test_a_removed_backend_ends_its_calls_and_its_tasks_go_elsewhere(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with AsyncExitStack() as stack:
        (leaving,) = await engines(stack, 1, Reply(ids=(7,), hold=True))
        (staying,) = await engines(stack, 1)
        await pool.add(leaving.address)
        async with pool.session("job", waits) as session:
            call = asyncio.create_task(session.generate([1], PARAMS))
            await leaving.until(lambda server: server.in_flight == 1)
            await pool.add(staying.address)
            assert await pool.remove(leaving.address + "/v1")
            assert not await pool.remove(leaving.address)
            leaving.release()
            assert (await call).backend == leaving.address
            after = await session.generate([1, 7], PARAMS)
    assert after.backend == staying.address
    assert after.retries == (f"moved from {leaving.address} to {staying.address}",)


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["short_ids", "short_logprobs", "nan_logprobs", "overflow_logprobs", "null_ids"])
async def test_a_contradictory_reply_is_retried_once_and_nothing_of_it_is_kept(
    make_pool: MakePool, waits: Waits, fault: str
) -> None:
    pool = make_pool()
    bad, good = Reply(text="wrong!", fault=fault), Reply(ids=(7,), logprobs=(-0.5,))  # type: ignore[arg-type]
    async with ScriptedLlm([(bad, good)]) as llm:
        await pool.add(llm.address)
        generation = await one_call(pool, waits)
    assert (generation.output_ids, generation.logprobs) == ([7], [-0.5])
    assert len(generation.retries) == 1
    assert llm.address in generation.retries[0]
    assert len(llm.requests) == 2


async def test_a_second_contradiction_ends_the_call(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with ScriptedLlm(Reply(text="12 tokens...", fault="short_ids")) as llm:
        await pool.add(llm.address)
        with pytest.raises(BackendError, match="usage counts 3 prompt and 13 sampled tokens"):
            await one_call(pool, waits)
        assert len(llm.requests) == 2


async def test_a_refused_request_is_not_repeated(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool()
    async with ScriptedLlm(Reply(), max_model_len=10) as llm:
        await pool.add(llm.address)
        with pytest.raises(BackendError, match="maximum context length is 10"):
            await one_call(pool, waits)
        assert len(llm.requests) == 1


@pytest.mark.parametrize("fault", ["status", "refuse", "die_mid_body"])
async def test_a_failed_call_goes_to_another_healthy_backend(make_pool: MakePool, waits: Waits, fault: str) -> None:
    pool = make_pool()
    async with AsyncExitStack() as stack:
        (bad,) = await engines(stack, 1, Reply(text="x", fault=fault))  # type: ignore[arg-type]
        (good,) = await engines(stack, 1, Reply(ids=(7,)))
        await pool.add(bad.address)
        async with pool.session("job", waits) as session:
            await pool.add(good.address)
            generation = await session.generate(PROMPT, PARAMS)
            assert (await session.generate(PROMPT, PARAMS)).retries == ()  # it stays there
    assert generation.backend == good.address
    assert len(generation.retries) == 2
    assert bad.address in generation.retries[0]
    assert generation.retries[1] == f"moved from {bad.address} to {good.address}"
    assert len(bad.requests) == 1


async def test_an_engine_that_dies_between_turns_loses_its_tasks_to_a_healthy_one(
    make_pool: MakePool, waits: Waits
) -> None:
    pool = make_pool()
    async with AsyncExitStack() as stack:
        first, second = await engines(stack, 2)
        await pool.add(first.address)
        async with pool.session("job", waits) as session:
            await session.generate(PROMPT, PARAMS)
            await pool.add(second.address)
            await first.stop()
            generation = await session.generate([*PROMPT, 4], PARAMS)
            assert generation.backend == second.address
            assert generation.retries[-1] == f"moved from {first.address} to {second.address}"
            await until(lambda: not pool.servers()[0].healthy)
            await first.start()
            await until(lambda: pool.servers()[0].healthy)
            assert (await session.generate([*PROMPT, 5], PARAMS)).backend == second.address
    assert waits.reasons == []


async def test_the_only_engine_fails_for_a_while_and_the_call_survives(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool(unhealthy_wait_s=5)
    failing, dying = Reply(fault="status", status=503), Reply(text="x", fault="die_mid_body")
    async with ScriptedLlm([(failing, dying, Reply(ids=(7,)))]) as llm:
        await pool.add(llm.address)
        generation = await one_call(pool, waits)
    assert generation.output_ids == [7]
    assert ["503" in generation.retries[0], "broke off" in generation.retries[1]] == [True, True]


@pytest.mark.parametrize("fault", ["status", "refuse"])
async def test_the_only_engine_keeps_failing_and_the_call_ends_within_the_bound(
    make_pool: MakePool, waits: Waits, fault: str
) -> None:
    pool = make_pool(unhealthy_wait_s=0.5)
    async with ScriptedLlm(Reply(fault=fault)) as llm:  # type: ignore[arg-type]
        await pool.add(llm.address)
        began = time.monotonic()
        with pytest.raises(BackendError, match="earlier failures") as caught:
            await one_call(pool, waits)
        assert time.monotonic() - began < 3
        assert len(llm.requests) < 10  # the back-off grows
    assert not caught.value.retryable


async def test_an_engine_that_hangs_ends_the_call_at_its_deadline(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool(call_timeout_s=0.3)
    async with ScriptedLlm(Reply(fault="hang")) as llm:
        await pool.add(llm.address)
        with pytest.raises(BackendError, match=r"no complete reply within 0\.3 s"):
            await one_call(pool, waits)
        assert len(llm.requests) == 1


async def test_an_engine_whose_host_drops_every_packet_fails_within_the_connect_bound(
    make_pool: MakePool, waits: Waits
) -> None:
    """A listener whose queue is full drops SYN packets, as a firewall does: connecting neither works nor fails."""
    pool = make_pool(connect_timeout_s=0.3, unhealthy_wait_s=0.5)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        server = await pool.add(f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert not server.healthy
        began = time.monotonic()
        with pytest.raises(BackendError):
            await one_call(pool, waits)
        assert time.monotonic() - began < 3
    assert waits.reasons == []  # registered, and dead: the job's timer runs


async def test_calls_on_an_engine_that_fell_silent_are_taken_back(make_pool: MakePool, waits: Waits) -> None:
    """A machine that loses power closes no connection: the health check is the only sign."""
    pool = make_pool(unhealthy_wait_s=0.5, health_interval_s=0.1)
    async with AsyncExitStack() as stack:
        (silent,) = await engines(stack, 1, Reply(hold=True))
        (good,) = await engines(stack, 1, Reply(ids=(7,)))
        await pool.add(silent.address)
        call = asyncio.create_task(one_call(pool, waits))
        await silent.until(lambda server: server.in_flight == 1)
        await pool.add(good.address)
        silent.healthy = False
        generation = await call
        assert silent.in_flight == 0
    assert generation.backend == good.address
    assert "no sign of life" in generation.retries[0]


async def test_one_missed_health_check_moves_nobody(make_pool: MakePool, waits: Waits) -> None:
    pool = make_pool(health_interval_s=0.05)
    async with ScriptedLlm(Reply(text="ok")) as llm:
        await pool.add(llm.address)
        checks = llm.health_checks
        llm.healthy = False
        await llm.until(lambda server: server.health_checks == checks + 1)
        llm.healthy = True
        await llm.until(lambda server: server.health_checks == checks + 2)
        assert pool.servers()[0].healthy
        llm.healthy = False
        await until(lambda: not pool.servers()[0].healthy)
        llm.healthy = True
        await until(lambda: pool.servers()[0].healthy)


@pytest.mark.parametrize("where", ["call", "back_off", "unhealthy"])
async def test_a_cancel_ends_a_call_at_once_and_no_further_request_is_sent(
    make_pool: MakePool, waits: Waits, where: str
) -> None:
    pool = make_pool(unhealthy_wait_s=30)
    reply = Reply(hold=True) if where == "call" else Reply(fault="status")
    async with ScriptedLlm(reply) as llm:
        await pool.add(llm.address)

        async def job(session: LlmSession) -> Generation:
            return await session.generate(PROMPT, PARAMS)

        async with pool.session("job", waits) as session:
            if where == "unhealthy":
                await llm.stop()
                await until(lambda: not pool.servers()[0].healthy)
            call = asyncio.create_task(job(session))
            if where == "call":
                await llm.until(lambda server: server.in_flight == 1)
            elif where == "back_off":
                await llm.until(lambda server: len(server.requests) == 3)
            else:
                await asyncio.sleep(0)
            seen = len(llm.requests)
            began = time.monotonic()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert time.monotonic() - began < 1
        if where == "call":
            await llm.until(lambda server: server.requests[0].closed_after_s is not None, timeout_s=1.0)
        assert len(llm.requests) == seen
        assert pool.calls_in_flight == 0
