"""What a client of /v1/completions sees: ids, log-probabilities, ends, batches."""

from __future__ import annotations

import http.client
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from .reference import Reference
from .serving import Server, until

IM_START, IM_END = 256, 257


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


def prompt(seed: int, length: int = 12) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def test_ids_go_in_and_out_unchanged(server: Server) -> None:
    ids = [IM_START, *b"user\n2+2", IM_END, 0, 255, 255]
    reply = server.complete(ids, ignore_eos=True)
    choice = reply["choices"][0]
    assert choice["prompt_token_ids"] == ids
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 8
    assert choice["finish_reason"] == "length"
    assert reply["model"] == "tiny"
    assert reply["usage"]["prompt_tokens"] == len(ids)
    assert reply["usage"]["completion_tokens"] == 8


def test_text_is_tokenized_with_its_control_tokens(server: Server) -> None:
    choice = server.choice("<|im_start|>é")
    assert choice["prompt_token_ids"] == [IM_START, *"é".encode()]


def test_ids_and_logprobs_come_only_when_asked_for(server: Server) -> None:
    choice = server.choice("x", logprobs=None, return_token_ids=None)
    assert choice["logprobs"] is None
    assert choice["token_ids"] is None


def test_greedy_is_that_of_transformers_also_in_a_mixed_batch(server: Server, reference: Reference) -> None:
    # 1 token; many; and two longer than one step's chunk, so that prefill and decoding share steps.
    prompts = [prompt(1, 1), prompt(2), prompt(3, 300), prompt(4, 600), prompt(5, 40), prompt(6, 77)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(lambda p: server.choice(p, temperature=0, max_tokens=40, ignore_eos=True), prompts))
    for ids, choice in zip(prompts, got, strict=True):
        assert choice["token_ids"] == reference.greedy(ids, 40)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(
            reference.logprobs(ids, choice["token_ids"]), abs=1e-3
        )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_p": 0.8},
        {"top_k": 5},
        {"min_p": 0.1},
        {"temperature": 0.8, "min_p": 0.02, "top_k": 20, "top_p": 0.9},
    ],
)
def test_logprobs_are_those_of_the_distribution_sampled_from(
    server: Server, reference: Reference, params: dict[str, Any]
) -> None:
    ids = prompt(7, 30)
    choice = server.choice(ids, max_tokens=60, seed=11, ignore_eos=True, **params)
    expected = reference.logprobs(ids, choice["token_ids"], **params)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-3)


def test_alternatives_are_reported_beside_the_sampled_token(server: Server, reference: Reference) -> None:
    ids = prompt(8)
    choice = server.choice(ids, logprobs=3, max_tokens=1, temperature=0, return_tokens_as_token_ids=True)
    (top,) = choice["logprobs"]["top_logprobs"]
    expected = {f"token_id:{i}": value for i, value in enumerate(reference.next_logprobs(ids))}
    best = sorted(expected, key=lambda name: -expected[name])[:3]
    assert top == pytest.approx({name: expected[name] for name in best}, abs=1e-3)


def test_a_seeded_request_samples_the_same_alone_and_in_a_full_batch(server: Server) -> None:
    params = {"seed": 5, "max_tokens": 50, "ignore_eos": True, "temperature": 0.9, "top_p": 0.95}
    alone = server.choice(prompt(9), **params)
    with ThreadPoolExecutor(9) as pool:
        crowd = [pool.submit(server.choice, prompt(100 + i, 10 + 30 * i), max_tokens=60) for i in range(8)]
        together = pool.submit(server.choice, prompt(9), **params).result()
        assert all(future.result()["token_ids"] for future in crowd)
    assert together["token_ids"] == alone["token_ids"]
    assert together["logprobs"]["token_logprobs"] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-3)
    assert server.choice(prompt(9), **{**params, "seed": 6})["token_ids"] != alone["token_ids"]


def test_unseeded_requests_differ(server: Server) -> None:
    outputs = {tuple(server.choice(prompt(10), max_tokens=20)["token_ids"]) for _ in range(3)}
    assert len(outputs) == 3


def test_n_samples_of_every_prompt_come_in_order(server: Server) -> None:
    prompts = [prompt(11, 400), prompt(12)]
    reply = server.complete(prompts, n=3, seed=20, max_tokens=6, ignore_eos=True)
    choices = reply["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [choice["prompt_token_ids"] for choice in choices] == [prompts[0]] * 3 + [prompts[1]] * 3
    assert len({tuple(choice["token_ids"]) for choice in choices[:3]}) == 3
    # Sample i of a seeded request is the one of seed + i.
    assert choices[2]["token_ids"] == server.choice(prompts[0], seed=22, max_tokens=6, ignore_eos=True)["token_ids"]
    assert reply["usage"]["prompt_tokens"] == 412
    assert reply["usage"]["completion_tokens"] == 36


def test_stop_ids_end_the_sequence_and_stay_in_it(server: Server) -> None:
    greedy = server.choice(prompt(13), temperature=0, max_tokens=20, ignore_eos=True)["token_ids"]
    stop = greedy[4]
    choice = server.choice(prompt(13), temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    assert choice["token_ids"] == greedy[: greedy.index(stop) + 1]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop


def test_the_end_token_ends_unless_ignored(server: Server) -> None:
    # With top_k = the whole vocabulary and a high temperature, the end token comes within a few hundred samples.
    params = {"temperature": 50.0, "seed": 1, "max_tokens": 1500}
    choice = server.choice(prompt(14), **params)
    assert choice["token_ids"][-1] == IM_END
    assert IM_END not in choice["token_ids"][:-1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    length = len(choice["token_ids"]) + 5
    longer = server.choice(prompt(14), **{**params, "max_tokens": length}, ignore_eos=True)
    assert longer["token_ids"][: length - 5] == choice["token_ids"]
    assert longer["finish_reason"] == "length"


def test_stop_strings_cut_the_text_and_not_the_ids(server: Server) -> None:
    params = {"temperature": 2.0, "seed": 2, "max_tokens": 40, "ignore_eos": True}
    whole = server.choice(prompt(15), **params)
    at = next(i for i, token in enumerate(whole["token_ids"]) if 97 <= token < 123)
    letter = chr(whole["token_ids"][at])
    choice = server.choice(prompt(15), **params, stop=["never seen", letter])
    assert choice["token_ids"] == whole["token_ids"][: at + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", letter)
    assert choice["text"] == whole["text"].partition(letter)[0]


def test_the_next_turn_of_a_conversation_reuses_what_was_computed(server: Server, reference: Reference) -> None:
    first = prompt(16, 500)
    sampled = server.choice(first, max_tokens=20, seed=3, ignore_eos=True)["token_ids"]
    second = [*first, *sampled, *prompt(17, 30)]
    reply = server.complete(second, temperature=0, max_tokens=10, ignore_eos=True)
    # All but the last sampled token, which was never run through the model.
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == len(first) + len(sampled) - 1
    assert reply["choices"][0]["token_ids"] == reference.greedy(second, 10)


def test_a_short_request_joins_and_leaves_while_a_long_one_runs(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.choice, prompt(18), max_tokens=1000, ignore_eos=True)
        until(lambda: server.metric("num_requests_running") == 1, "the long request runs")
        assert len(server.choice(prompt(19), max_tokens=3, ignore_eos=True)["token_ids"]) == 3
        assert not long.done()
        assert len(long.result()["token_ids"]) == 1000


def test_a_client_that_leaves_frees_its_slots_at_once(server: Server) -> None:
    body = {"prompt": prompt(20), "n": 6, "max_tokens": 1900, "ignore_eos": True}
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    until(lambda: server.metric("num_requests_running") == 4, "all four slots are taken")
    assert server.metric("num_requests_waiting") == 2
    connection.close()
    until(lambda: server.metric("num_requests_running") == 0, "the slots are free", deadline_s=2)
    assert server.metric("num_requests_waiting") == 0
    assert server.choice(prompt(20), max_tokens=2, ignore_eos=True)["finish_reason"] == "length"


def test_models_health_and_metrics(server: Server, tiny_model: Path) -> None:
    _, models = server.call("/v1/models")
    (card,) = models["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", str(tiny_model), 2048)
    assert server.call("/health") == (200, "")
    before = server.metric("generation_tokens_total")
    server.complete("a", max_tokens=7, ignore_eos=True)
    assert server.metric("generation_tokens_total") == before + 7


def test_a_conversation_is_answered_by_the_ids_of_its_template(server: Server, reference: Reference) -> None:
    ids = [IM_START, *b"user\nhi", IM_END, *b"\n", IM_START, *b"assistant\n"]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5, "temperature": 0, "n": 2}
    body |= {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "ignore_eos": True}
    status, reply = server.call("/v1/chat/completions", body)
    assert status == 200
    assert reply["prompt_token_ids"] == ids
    assert reply["usage"]["prompt_tokens"] == len(ids)
    for choice in reply["choices"]:
        assert choice["token_ids"] == reference.greedy(ids, 5)
        assert choice["message"]["role"] == "assistant"
        assert choice["message"]["content"] == bytes(choice["token_ids"]).decode(errors="replace")
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert logprobs == pytest.approx(reference.logprobs(ids, choice["token_ids"]), abs=1e-3)
    status, reply = server.call("/v1/chat/completions", {"messages": [{"content": 3}]})
    assert (status, reply["error"]["param"]) == (400, "messages")


def test_text_and_conversations_are_tokenized_on_request(server: Server) -> None:
    _, plain = server.call("/tokenize", {"prompt": "hé"})
    assert (plain["tokens"], plain["count"], plain["max_model_len"]) == (list("hé".encode()), 3, 2048)
    _, chat = server.call("/tokenize", {"messages": [{"role": "user", "content": "a"}]})
    assert chat["tokens"] == [IM_START, *b"user\na", IM_END, *b"\n", IM_START, *b"assistant\n"]
    _, text = server.call("/detokenize", {"tokens": chat["tokens"]})
    assert text["prompt"] == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
