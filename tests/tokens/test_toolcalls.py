"""Calls run as written or not at all; what was wrong is told to the model."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.tokens.reasoning import split_reasoning
from prorl_gym.tokens.toolcalls import format_call, parse_calls


def hermes(text: str, complete: bool = True, turn: int = 0):
    return parse_calls(text, "hermes", complete=complete, turn=turn)


def one(text: str, complete: bool = True):
    [request] = hermes(text, complete).requests
    return request


def call(arguments: str, name: str = "bash") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_text_around_calls_is_content_and_ids_are_unique_per_turn():
    found = hermes("First.\n" + call("{}") + " then " + call('{"a": 1}') + "\nDone.", turn=7)
    assert found.content == "First.\nthen\nDone."
    assert [(r.id, r.name, r.arguments) for r in found.requests] == [
        ("call_7_0", "bash", {}),
        ("call_7_1", "bash", {"a": 1}),
    ]


def test_text_without_calls_is_left_as_it_is():
    assert hermes("  4 \n").content == "  4 \n"


@pytest.mark.parametrize("text", ["</tool_call>", "<tool_call>", '{"name": "x"}', "</think>"])
def test_a_tag_inside_a_string_argument_belongs_to_the_string(text):
    [request] = hermes(call(json.dumps({"command": f"echo {text}"})) + call("{}")).requests[:1]
    assert request.arguments == {"command": f"echo {text}"}
    assert len(hermes(call(json.dumps({"command": f"echo {text}"})) + call("{}")).requests) == 2


def test_bad_escapes_are_an_error_and_never_empty_arguments():
    request = one(call(r"""{"command": "sed -n '/\s$/p' f"}"""))
    assert request.arguments is None
    assert "invalid JSON" in request.error and r"\s$" in request.error.replace(r"\\", "\\")
    assert request.name == "bash"


def test_raw_line_breaks_in_a_string_run_as_they_stand():
    assert one(call('{"command": "a\n\tb"}')).arguments == {"command": "a\n\tb"}


def test_surrogate_pairs_are_joined_and_lone_ones_replaced():
    arguments = one(call(r'{"command": "echo \ud83d\ude80 \ud83d", "\ude80": ["\ude80"]}')).arguments
    assert arguments == {"command": "echo 🚀 \ufffd", "\ufffd": ["\ufffd"]}
    json.dumps(arguments, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('"{\\"command\\": \\"ls\\"}"', "not a string"),
        ('["ls"]', "not a list"),
        ("null", "not null"),
        ("3", "not a number"),
        ('{"n": NaN}', "NaN is no JSON number"),
        ('{"n": -Infinity}', "-Infinity is no JSON number"),
        ('{"n": 1e999}', "too large"),
        ('{"n": 99999999999999999999}', "64 bits"),
        ('{"n": ' + "9" * 5000 + "}", "64 bits"),
        ('{"n": ' + "[" * 100 + "]" * 100 + "}", "nested too deeply"),
        ('{"n": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ("{'command': 'ls'}", "invalid JSON"),
        ('{"command": "ls"}}', "instead of </tool_call>"),
        ("", "invalid JSON"),
    ],
)
def test_arguments_that_are_no_json_object_are_refused_with_a_reason(arguments, reason):
    text = f"Look: {call(arguments)}"
    request = one(text)
    assert request.arguments is None
    assert request.error.startswith("This tool call was not run: ") and reason in request.error
    assert hermes(text).content.startswith("Look:\n<tool_call>"), "what the model wrote is not lost"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": 3, "arguments": {}}', '"name" must'),
        ('{"arguments": {}}', '"name" must'),
        ('{"name": "", "arguments": {}}', '"name" must'),
        ('{"name": "submit"}', '"arguments" is missing'),
        ('[{"name": "x", "arguments": {}}]', "not a list"),
        ("", "invalid JSON"),
    ],
)
def test_what_is_no_call_object_is_refused_with_a_reason(body, reason):
    assert reason in one(f"<tool_call>{body}</tool_call>").error


def test_one_bad_call_among_several_gives_one_error_in_its_place():
    bad = r'<tool_call>{"name": "bash", "arguments": {"command": "\d"}}</tool_call>'
    unclosed = '<tool_call>{"name": "bash", "arguments": '
    requests = hermes(call('{"n": 1}') + bad + call('{"n": 2}') + unclosed + call('{"n": 3}')).requests
    assert [request.arguments for request in requests] == [{"n": 1}, None, {"n": 2}, None, {"n": 3}]
    assert [request.id for request in requests] == [f"call_0_{i}" for i in range(5)]


def test_a_call_cut_at_any_place_never_runs():
    whole = call('{"command": "rm -rf build"}')
    for length in range(len("<tool_call>"), len(whole)):
        request = one(whole[:length], complete=False)
        assert request.arguments is None and "cut off" in request.error, whole[:length]
    assert one(whole, complete=False).arguments == {"command": "rm -rf build"}
    assert hermes(whole[:5], complete=False).requests == ()


def test_a_call_whose_closing_tag_the_model_left_out_runs_when_the_turn_is_whole():
    assert one('<tool_call>\n{"name": "bash", "arguments": {"n": 1}}').arguments == {"n": 1}


FENCED = '```json\n{"name": "bash", "arguments": {"command": "echo ```"}}\n```'


def test_fenced_calls_are_read_and_other_blocks_left_alone():
    text = f'Look:\n{FENCED}\nand\n```json\n{{"a": 1}}\n```\n```python\nprint("name")\n```'
    found = parse_calls(text, "fenced", complete=True, turn=0)
    assert [request.arguments for request in found.requests] == [{"command": "echo ```"}]
    assert found.content == 'Look:\nand\n```json\n{"a": 1}\n```\n```python\nprint("name")\n```'


def test_fenced_calls_that_are_malformed_or_cut_never_run():
    broken = '```json\n{"name": "bash", "arguments": {"command": "\\d"}}\n```'
    [bad, good] = parse_calls(f"{broken}\n{FENCED}", "fenced", complete=True, turn=0).requests
    assert bad.arguments is None and "invalid JSON" in bad.error
    assert good.arguments is not None
    for length in range(len(FENCED)):
        for request in parse_calls(FENCED[:length], "fenced", complete=False, turn=0).requests:
            assert request.arguments is None and "cut off" in request.error


PIECES = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "bash", ',
    '"arguments": {}}',
    "{",
    "}",
    '"',
    "\\",
    "```json\n",
    "\n```",
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=12).map("".join), st.booleans())
def test_no_text_makes_it_raise_and_every_result_is_json(text, complete):
    for style in ("hermes", "fenced"):
        for request in parse_calls(text, style, complete=complete, turn=0).requests:
            assert (request.arguments is None) == (request.error is not None)
            orjson.dumps(request.arguments)


@given(
    st.dictionaries(st.text(), JSON, max_size=4),
    st.text(min_size=1, max_size=10),
    st.sampled_from(["hermes", "fenced"]),
)
def test_what_is_written_is_read_back(arguments, name, style):
    [request] = parse_calls(format_call(name, arguments, style), style, complete=True, turn=0).requests
    assert (request.name, request.arguments) == (name, arguments)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\n4", False, "hm", "4"),
        ("hm\n</think>\n\n4", True, "hm", "4"),
        ("<think>hm</think>4", True, "hm", "4"),
        ("hm</think>4", False, "hm", "4"),
        ("<think>\n\n</think>\n\n4", False, "", "4"),
        ("4", False, None, "4"),
        ("4 <think>no</think>", True, "4 <think>no", ""),
        ("<think>hm", False, "hm", ""),
        ("hm", True, "hm", ""),
        (call('{"command": "echo </think>"}'), False, None, call('{"command": "echo </think>"}')),
    ],
)
def test_reasoning_is_split_off(text, opened, reasoning, content):
    split = split_reasoning(text, opened=opened)
    assert (split.reasoning, split.content) == (reasoning, content)
