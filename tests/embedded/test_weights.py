"""Another checkpoint for a live server, and weights that compute nonsense."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.testing import make_tiny_model

from .reference import Reference
from .serving import Server, until

PROMPT = [*b"the same prompt, again and again"]


@pytest.fixture(autouse=True)
def restored(server: Server, tiny_model: Path) -> Iterator[None]:
    yield
    assert reload(server, tiny_model)[0] == 200


def reload(server: Server, path: Path | str) -> tuple[int, Any]:
    return server.call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})


def greedy(server: Server, prompt: list[int] = PROMPT) -> list[int]:
    ids: list[int] = server.choice(prompt, temperature=0, max_tokens=12, ignore_eos=True)["token_ids"]
    return ids


def test_a_checkpoint_is_swapped_under_running_requests(server: Server, tiny_model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    old, new = Reference(tiny_model), Reference(other)
    assert greedy(server) == old.greedy(PROMPT, 12)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.choice, PROMPT[:5], temperature=0, max_tokens=1200, ignore_eos=True)
        until(lambda: server.metric("num_requests_running") == 1, "the request runs")
        assert reload(server, other) == (200, {"results": [None]})
        assert not running.done()
        # Nothing that the old weights computed is reused, in the cache or in the running request.
        assert greedy(server) == new.greedy(PROMPT, 12)
        sampled = running.result()["token_ids"]
    tail = [*PROMPT[:5], *sampled[:-8]]
    assert sampled[-8:] == new.greedy(tail, 8)


def test_what_is_no_checkpoint_of_the_model_changes_nothing(server: Server, tiny_model: Path, tmp_path: Path) -> None:
    before = greedy(server)
    wider = make_tiny_model(tmp_path / "wider", hidden_size=96)
    for path in (wider, tmp_path / "missing"):
        status, reply = reload(server, path)
        assert status == 400
        assert reply["error"]["param"] == "kwargs.weights_path"
        assert str(path) in reply["error"]["message"]
    assert greedy(server) == before


def test_nan_fails_its_own_request_only(server: Server, tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.model.embed_tokens.weight.data[7] = float("nan")
    model.save_pretrained(tmp_path)
    assert reload(server, tmp_path)[0] == 200
    before = greedy(server)
    with ThreadPoolExecutor(2) as pool:
        healthy = pool.submit(server.choice, PROMPT, temperature=0, max_tokens=12, ignore_eos=True)
        status, reply = server.call("/v1/completions", {"prompt": [1, 7, 1], "logprobs": 0, "n": 3})
        assert (status, reply["error"]["type"]) == (500, "InternalServerError")
        assert "not finite" in reply["error"]["message"]
        assert healthy.result()["token_ids"] == before
    # Whatever slot is taken now, no NaN is left in it.
    for first in range(10, 18):
        assert server.choice([first, *PROMPT], max_tokens=1)["token_ids"]
