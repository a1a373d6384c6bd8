"""What is refused, and that the refusal names what is wrong in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import pytest

from .serving import Server


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", []),
        ("prompt", ""),
        ("prompt", 3),
        ("prompt", [[]]),
        ("prompt", [1, 2.5]),
        ("prompt", [1, True]),
        ("prompt", [259]),
        ("prompt", [-1]),
        ("prompt", [[1], "a", 2]),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("seed", 2**64),
        ("n", 0),
        ("n", 1000),
        ("logprobs", 21),
        ("stop", [""]),
        ("stop_token_ids", "x"),
        ("stream", True),
        ("echo", True),
        ("best_of", 4),
        ("repetition_penalty", 1.1),
        ("temprature", 1),
    ],
)
def test_a_bad_field_is_named(server: Server, field: str, value: Any) -> None:
    status, reply = server.call("/v1/completions", {"prompt": [1, 2], field: value})
    assert status == 400
    error = reply["error"]
    assert error["param"].partition(".")[0] == field
    assert field in error["message"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)


def test_values_that_ask_for_nothing_are_accepted(server: Server) -> None:
    neutral = {"stream": False, "echo": False, "repetition_penalty": 1.0, "presence_penalty": 0, "logit_bias": None}
    assert server.choice([1], **neutral, top_k=-1, stop=None, stop_token_ids=None, user="me")["token_ids"]


def test_a_prompt_beyond_the_context_is_refused_as_vllm_does(server: Server) -> None:
    for length, limit, field in ((2048, 1, "prompt"), (2040, 9, "max_tokens"), (3000, None, "prompt")):
        status, reply = server.call("/v1/completions", {"prompt": [1] * length, "max_tokens": limit})
        assert status == 400
        assert "maximum context length is 2048 tokens" in reply["error"]["message"]
        assert reply["error"]["param"] == field
    full = server.choice([1] * 2040, max_tokens=8, ignore_eos=True)
    assert (len(full["token_ids"]), full["finish_reason"]) == (8, "length")
    rest = server.choice([1] * 2040, max_tokens=None, ignore_eos=True)
    assert (len(rest["token_ids"]), rest["finish_reason"]) == (8, "length")


@pytest.mark.parametrize(
    "raw", [b"{", b"[1]", b"\xff", b'{"prompt": "\\ud800"}', b'{"prompt": [1], "temperature": NaN}']
)
def test_a_malformed_body_is_a_400(server: Server, raw: bytes) -> None:
    status, reply = server.call("/v1/completions", raw=raw)
    assert status == 400
    assert reply["error"]["type"] == "BadRequestError"


def test_other_refusals_have_the_same_shape(server: Server) -> None:
    assert server.call("/v1/completions", {"prompt": [1], "model": "other"})[0] == 404
    assert server.call("/v1/nothing")[1]["error"]["code"] == 404
    assert server.call("/v1/completions")[1]["error"]["code"] == 405
    refused = server.call("/v1/completions", {"prompt": [1]}, **{"Content-Type": "text/plain"})
    assert (refused[0], refused[1]["error"]["code"]) == (415, 415)
    assert server.call("/collective_rpc", {"method": "exit"})[1]["error"]["param"] == "method"


def test_control_characters_in_text_are_ordinary_text(server: Server) -> None:
    assert server.choice("a\x00b")["prompt_token_ids"] == [97, 0, 98]
