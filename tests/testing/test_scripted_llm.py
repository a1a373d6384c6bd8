"""The scripted LLM server as a client sees it over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prorl_gym.testing import ByteTokenizer, Conversation, Reply, Script, ScriptedLlm
from prorl_gym.testing.byte_tokenizer import IM_END_ID
from prorl_gym.testing.script import PromptIndex, load_script


async def complete(llm: ScriptedLlm, prompt: list[int] | str, /, **params: Any) -> tuple[int, Any]:
    """Call /v1/completions once; return status and parsed body."""
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    body = {"prompt": ids, "max_tokens": 64, "logprobs": 0, "return_token_ids": True, **params}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{llm.address}/v1/completions", json=body) as response,
    ):
        return response.status, json.loads(await response.read())


async def test_answers_as_vllm_does() -> None:
    async with ScriptedLlm([Reply(text="hi")], model="m") as llm:
        status, reply = await complete(llm, "2+2", model="m")
    choice = reply["choices"][0]
    assert status == 200
    assert reply["object"] == "text_completion"
    assert reply["model"] == "m"
    assert choice["text"] == "hi"
    assert choice["token_ids"] == [*b"hi", IM_END_ID]
    assert choice["prompt_token_ids"] == list(b"2+2")
    assert len(choice["logprobs"]["token_logprobs"]) == 3
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"])
    assert choice["finish_reason"] == "stop"
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": None,
    }


async def test_ids_and_logprobs_come_only_when_asked_for() -> None:
    async with ScriptedLlm(Reply(text="hi")) as llm:
        _, reply = await complete(llm, "x", logprobs=None, return_token_ids=False)
    assert reply["choices"][0]["logprobs"] is None
    assert reply["choices"][0]["token_ids"] is None


async def test_max_tokens_cuts_and_says_length() -> None:
    async with ScriptedLlm(Reply(text="hello")) as llm:
        _, cut = await complete(llm, "x", max_tokens=3)
        _, whole = await complete(llm, "x", max_tokens=6)
    assert cut["choices"][0]["token_ids"] == list(b"hel")
    assert cut["choices"][0]["text"] == "hel"
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 3
    assert whole["choices"][0]["finish_reason"] == "stop"


async def test_explicit_ids_logprobs_and_spans_are_taken_as_they_are() -> None:
    reply = Reply(ids=(7, 8), logprobs=(-0.5, -0.25), finish_reason="abort", weight_versions=((3, 0, 2),))
    async with ScriptedLlm(reply) as llm:
        _, body = await complete(llm, "x")
    choice = body["choices"][0]
    assert choice["token_ids"] == [7, 8]
    assert choice["logprobs"]["token_logprobs"] == [-0.5, -0.25]
    assert choice["finish_reason"] == "abort"
    assert choice["weight_versions"] == [{"version": 3, "start": 0, "end": 2}]


async def test_end_turn_can_be_left_out_or_added() -> None:
    async with ScriptedLlm([(Reply(text="a", end_turn=False), Reply(ids=(5,), end_turn=True))]) as llm:
        _, without = await complete(llm, "x")
        _, added = await complete(llm, "x")
    assert without["choices"][0]["token_ids"] == list(b"a")
    assert added["choices"][0]["token_ids"] == [5, IM_END_ID]


async def test_n_gives_n_choices_and_counts_them_all() -> None:
    async with ScriptedLlm(Reply(text="hi")) as llm:
        _, reply = await complete(llm, "x", n=3)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize(
    ("params", "status", "word"),
    [
        ({"model": "other"}, 404, "does not exist"),
        ({"max_tokens": 0}, 400, "at least 1"),
        ({"max_tokens": 40}, 400, "maximum context length"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": "text"}, 400, "token ids"),
        ({"prompt": [-1]}, 400, "token ids"),
    ],
)
async def test_refuses_what_vllm_refuses(params: dict[str, Any], status: int, word: str) -> None:
    async with ScriptedLlm(Reply(text="hi"), max_model_len=32) as llm:
        got, reply = await complete(llm, "x", **params)
    assert got == status
    assert word in reply["error"]["message"]


async def test_models_health_and_api_key() -> None:
    async with ScriptedLlm(Reply(), max_model_len=99, api_key="k") as llm, aiohttp.ClientSession() as session:
        async with session.get(f"{llm.address}/v1/models") as response:
            assert response.status == 401
        async with session.get(f"{llm.address}/v1/models", headers={"Authorization": "Bearer k"}) as response:
            card = (await response.json())["data"][0]
            assert (card["id"], card["max_model_len"]) == ("scripted", 99)
        async with session.get(f"{llm.address}/health") as response:
            assert response.status == 200
        llm.healthy = False
        async with session.get(f"{llm.address}/health") as response:
            assert response.status == 503
        assert llm.health_checks == 2


# -- choosing a reply ---------------------------------------------------------------------------------------------


async def test_turns_follow_the_conversation_also_in_equal_conversations_side_by_side() -> None:
    async with ScriptedLlm([Reply(text="a"), Reply(text="b"), Reply(text="c")]) as llm:
        for _ in range(3):
            texts = [
                (await complete(llm, prompt))[1]["choices"][0]["text"] for prompt in ("p", "pa1", "pa1b2", "pa1b2c3")
            ]
            assert texts == ["a", "b", "c", "c"]
        assert [r.turn for r in llm.requests][:4] == [0, 1, 2, 3]


async def test_a_turn_with_attempts_answers_a_retry_differently() -> None:
    async with ScriptedLlm([(Reply(fault="status"), Reply(text="ok")), Reply(text="next")]) as llm:
        assert (await complete(llm, "p"))[0] == 500
        assert (await complete(llm, "p"))[1]["choices"][0]["text"] == "ok"
        assert (await complete(llm, "pq"))[1]["choices"][0]["text"] == "next"


async def test_a_conversation_is_picked_by_its_text_and_a_function_sees_ids_and_index() -> None:
    script = Script((Reply(text="?"),), (Conversation("2+2", (Reply(text="4"),)),))
    async with ScriptedLlm(script) as llm:
        assert (await complete(llm, "what is 2+2"))[1]["choices"][0]["text"] == "4"
        assert (await complete(llm, "what"))[1]["choices"][0]["text"] == "?"
    async with ScriptedLlm(lambda ids, index: Reply(text=f"{index}:{len(ids)}")) as llm:
        await complete(llm, "abc")
        assert (await complete(llm, "ab"))[1]["choices"][0]["text"] == "1:2"


def test_prompt_index_counts_every_earlier_proper_prefix() -> None:
    index = PromptIndex()
    assert index.add([1, 2, 3, 4]) == (0, 0)
    assert index.add([1]) == (0, 0)
    assert index.add([1, 2, 9]) == (1, 0)
    assert index.add([1, 2]) == (1, 0)
    assert index.add([1, 2, 3, 4, 5]) == (3, 0)
    assert index.add([1, 2, 3, 4]) == (2, 1)
    assert index.add([256]) == (0, 0)


# -- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["refuse", "die_mid_body"])
async def test_faults_that_break_the_connection(fault: Any) -> None:
    async with ScriptedLlm(Reply(text="hello", fault=fault)) as llm:
        with pytest.raises(aiohttp.ClientError):
            await complete(llm, "x")
        assert llm.in_flight == 0


async def test_faults_in_the_reply() -> None:
    async def answer(fault: Any) -> Any:
        async with ScriptedLlm(Reply(text="hello", fault=fault)) as llm:
            return (await complete(llm, "x"))[1]

    short = await answer("short_ids")
    assert short["usage"]["completion_tokens"] - len(short["choices"][0]["token_ids"]) == 3
    fewer = (await answer("short_logprobs"))["choices"][0]
    assert len(fewer["token_ids"]) - len(fewer["logprobs"]["token_logprobs"]) == 1
    for fault in ("nan_logprobs", "inf_logprobs", "overflow_logprobs"):
        assert not math.isfinite((await answer(fault))["choices"][0]["logprobs"]["token_logprobs"][-1])
    assert (await answer("null_logprobs"))["choices"][0]["logprobs"]["token_logprobs"][-1] is None
    assert (await answer("no_logprobs"))["choices"][0]["logprobs"] is None
    assert (await answer("null_ids"))["choices"][0]["token_ids"] is None
    assert (await answer("no_choices"))["choices"] == []
    assert await answer("not_an_object") == []
    with pytest.raises(json.JSONDecodeError):
        await answer("invalid_json")


async def test_a_held_call_answers_on_release_and_a_hanging_one_never() -> None:
    async with ScriptedLlm([Reply(text="h", hold=True)]) as llm:
        first, second = (asyncio.create_task(complete(llm, text)) for text in ("a", "b"))
        await llm.until(lambda llm: llm.in_flight == 2)
        assert llm.release(1) == 1
        await llm.until(lambda llm: llm.in_flight == 1)
        llm.release()
        assert (await first)[0] == (await second)[0] == 200
        assert llm.max_in_flight == 2
    async with ScriptedLlm([Reply(fault="hang")]) as llm:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(complete(llm, "a"), 0.2)
        assert llm.release() == 0


async def test_records_when_the_client_leaves() -> None:
    async with ScriptedLlm(Reply(fault="hang")) as llm:
        call = asyncio.create_task(complete(llm, "abc", temperature=0.5))
        await llm.until(lambda llm: llm.in_flight == 1)
        call.cancel()
        await llm.until(lambda llm: llm.requests[0].closed_after_s is not None, timeout_s=1)
        record = llm.requests[0]
    assert list(record.prompt_ids) == list(b"abc")
    assert record.params["temperature"] == 0.5
    assert record.status is None
    assert llm.in_flight == 0


async def test_delay_is_kept_and_cancelled_with_the_connection() -> None:
    async with ScriptedLlm(Reply(text="a", delay_s=0.05)) as llm:
        started = time.monotonic()
        await complete(llm, "x")
        assert time.monotonic() - started >= 0.05


async def test_stop_drops_connections_and_start_takes_the_same_port() -> None:
    llm = ScriptedLlm(Reply(text="a", hold=True))
    await llm.start()
    address = llm.address
    call = asyncio.create_task(complete(llm, "x"))
    await llm.until(lambda llm: llm.in_flight == 1)
    await llm.stop()
    with pytest.raises(aiohttp.ClientError):
        await call
    await llm.start()
    assert llm.address == address
    await llm.stop()
    await llm.stop()


async def test_connections_have_nodelay_and_kept_alive_replies_are_quick() -> None:
    async with ScriptedLlm(Reply(text="a")) as llm, aiohttp.ClientSession() as session:
        best = math.inf
        for _ in range(10):
            started = time.perf_counter()
            async with session.post(f"{llm.address}/v1/completions", json={"prompt": [1]}) as response:
                await response.read()
            best = min(best, time.perf_counter() - started)
        server_sides = [c._transport.get_extra_info("socket") for c in llm._connections if c._transport]
        assert server_sides
        assert all(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in server_sides)
    assert best < 0.03


async def test_what_is_no_http_gets_a_400() -> None:
    async with ScriptedLlm(Reply()) as llm:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(llm.address.rsplit(":", 1)[1]))
        writer.write(b"\x00\x01garbage\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        await writer.wait_closed()


def test_byte_tokenizer_keeps_hostile_text_as_text() -> None:
    tokenizer = ByteTokenizer()
    assert max(tokenizer.encode("<|im_end|>\ud800")) < 256
    assert tokenizer.decode([*"ä".encode(), IM_END_ID]) == "ä"


# -- as a process -------------------------------------------------------------------------------------------------


async def test_runs_as_a_process_with_an_address_file(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"replies": [{"text": "4"}, [{"fault": "status"}, {"text": "5"}]]}))
    address_file = tmp_path / "address"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prorl_gym.testing.scripted_llm",
        "--script", str(script), "--port", "0", "--address-file", str(address_file),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert process.stdout is not None
    address = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
    assert address_file.read_text() == address
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{address}/v1/completions", json={"prompt": [1]}) as response,
    ):
        assert (await response.json())["choices"][0]["text"] == "4"
    async with aiohttp.ClientSession() as session, session.get(f"{address}/requests") as response:
        assert len((await response.json())["requests"]) == 1
    process.send_signal(signal.SIGTERM)
    _, errors = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 0
    assert errors == b""


def test_a_typo_in_a_script_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('{"replies": [{"txt": "4"}]}')
    with pytest.raises(ValueError, match="txt"):
        load_script(path)
