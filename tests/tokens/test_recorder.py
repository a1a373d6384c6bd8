"""The record of an episode: what a trainer gets out is what went in, and nothing is claimed that did not happen."""

import math
import threading

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.errors import BackendError
from prorl_gym.tokens.recorder import Recorder
from prorl_gym.tokens.records import ChatMessage, Generation, Parsed, Rendered, ToolRequest, VersionSpan
from prorl_gym.types import Message, Segment

SYSTEM, USER = ChatMessage("system", "s"), ChatMessage("user", "u")


def generation(*ids: int, version: int | None = 1, **changes: object) -> Generation:
    fields = {
        "output_ids": list(ids),
        "logprobs": [-0.5 - i / 8 for i in range(len(ids))],
        "finish_reason": "stop",
        "versions": (VersionSpan(0, len(ids), version),),
        "backend": "http://engine",
    }
    return Generation(**(fields | changes))


def said(text: str = "a", **changes: object) -> Parsed:
    return Parsed(ChatMessage("assistant", text, **changes), complete=True)


def tool(text: str) -> ChatMessage:
    return ChatMessage("tool", text, tool_call_id="c")


def two_turns() -> Recorder:
    recorder = Recorder()
    recorder.add_messages([SYSTEM, USER])
    recorder.add_call(Rendered([1, 2, 3], ((0, 1), (1, 3))), generation(10, 11), said("one"))
    recorder.add_messages([tool("x"), tool("y")])
    recorder.add_call(Rendered([1, 2, 3, 10, 11, 20, 21, 22], ((5, 6), (6, 8))), generation(12, version=2), said("two"))
    return recorder


def test_one_segment_holds_prompt_sampled_and_observed_ids():
    recorder = two_turns()
    [segment] = recorder.segments()
    assert segment == {
        "prompt_ids": [1, 2, 3],
        "response_ids": [10, 11, 20, 21, 22, 12],
        "response_mask": [1, 1, 0, 0, 0, 1],
        "logprobs": [-0.5, -0.625, 0.0, 0.0, 0.0, -0.5],
        "versions": [[0, 2, 1], [5, 6, 2]],
        "agent": "main",
        "num_turns": 2,
    }
    Segment.model_validate(segment)
    assert recorder.policy_versions() == {"min": 1, "max": 2}
    assert (recorder.num_turns, recorder.sampled_tokens) == (2, 3)


def test_messages_carry_the_ids_they_stand_for():
    messages = [Message.model_validate(m) for m in two_turns().messages(token_ids=True)]
    assert [m.token_ids for m in messages] == [[1], [2, 3], [10, 11], [20], [21, 22], [12]]
    assert messages[2].input_ids == [1, 2, 3]
    assert messages[5].input_ids == [1, 2, 3, 10, 11, 20, 21, 22]
    assert messages[5].output_ids == [12]
    assert messages[2].logprobs == [-0.5, -0.625]
    assert [m.policy_version for m in messages] == [None, None, 1, None, None, 2]


def test_text_only_messages_hold_no_arrays():
    for message in two_turns().messages(token_ids=False):
        assert not {"token_ids", "input_ids", "output_ids", "logprobs"} & message.keys()


def test_messages_show_at_once_and_have_no_ids_until_a_call_saw_them():
    recorder = Recorder()
    recorder.add_messages([USER])
    [message] = recorder.messages(token_ids=True)
    assert message == {"role": "user", "content": "u", "agent": "main", "segment": None}
    assert recorder.segments() == [] and recorder.policy_versions() == {"min": None, "max": None}


def test_a_prompt_that_does_not_begin_with_the_history_opens_a_segment_whatever_it_says():
    recorder = two_turns()
    recorder.add_messages([tool("z")])
    recorder.add_call(Rendered([1, 2, 3, 9, 9, 30, 31], ((5, 7),), append_only=True), generation(13), said())
    first, second = recorder.segments()
    assert first["response_ids"] == [10, 11, 20, 21, 22, 12]
    assert (second["prompt_ids"], second["response_ids"], second["num_turns"]) == ([1, 2, 3, 9, 9, 30, 31], [13], 1)
    observed, answer = recorder.messages(token_ids=True)[-2:]
    assert (observed["segment"], observed["token_ids"]) == (1, [30, 31])
    assert answer["input_ids"] == [1, 2, 3, 9, 9, 30, 31]


def test_a_true_prefix_is_kept_whatever_append_only_says():
    recorder = two_turns()
    recorder.add_messages([tool("z")])
    ids = [1, 2, 3, 10, 11, 20, 21, 22, 12, 40]
    recorder.add_call(Rendered(ids, ((9, 10),), append_only=False), generation(13), said())
    assert len(recorder.segments()) == 1


def test_the_prompt_that_the_engine_saw_is_the_truth():
    recorder = Recorder()
    recorder.add_messages([SYSTEM, USER])
    prompt = Rendered([1, 2, 3], ((0, 1), (1, 3)))
    recorder.add_call(prompt, generation(10, prompt_ids=[7, 8]), said())
    [segment] = recorder.segments()
    assert segment["prompt_ids"] == [7, 8]
    assert [m["token_ids"] for m in recorder.messages(token_ids=True)] == [[], [7, 8], [10]]


def test_spans_that_do_not_fit_give_everything_to_one_message():
    recorder = two_turns()
    recorder.add_messages([tool("p"), tool("q")])
    ids = [1, 2, 3, 10, 11, 20, 21, 22, 12, 40, 41]
    recorder.add_call(Rendered(ids, ((8, 10), (10, 11))), generation(13), said())
    assert [m["token_ids"] for m in recorder.messages(token_ids=True)][-3:] == [[40, 41], [], [13]]


def test_new_ids_without_a_message_are_a_segment_of_their_own():
    recorder = two_turns()
    recorder.add_call(Rendered([1, 2, 3, 10, 11, 20, 21, 22, 12, 99]), generation(13), said())
    assert [s["num_turns"] for s in recorder.segments()] == [2, 1]


def test_agents_have_segments_of_their_own():
    recorder = two_turns()
    recorder.add_messages([USER], agent="critic")
    recorder.add_call(Rendered([1, 2, 3], ((0, 3),)), generation(50), said(), agent="critic")
    recorder.add_messages([tool("z")])
    recorder.add_call(Rendered([1, 2, 3, 10, 11, 20, 21, 22, 12, 40], ((9, 10),)), generation(13), said())
    main, critic = recorder.segments()
    assert (main["agent"], main["num_turns"]) == ("main", 3)
    assert (critic["agent"], critic["response_ids"]) == ("critic", [50])
    assert [r["segment"] for r in recorder.ledger()] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": [-1.0, math.nan]}, r"logprobs\[1\] is nan"),
        ({"logprobs": [-math.inf, -1.0]}, r"logprobs\[0\] is -inf"),
        ({"logprobs": [0.5, -1.0]}, r"logprobs\[0\] is 0.5"),
        ({"logprobs": [-1.0, None]}, "no number"),
        ({"logprobs": [-1.0]}, "2 sampled ids came with 1 logprobs"),
        ({"output_ids": [1, -2]}, "negative"),
        ({"output_ids": [1, 2**40]}, "no token id"),
        ({"output_ids": [], "logprobs": []}, "no token at all"),
        ({"versions": (VersionSpan(0, 1, 1),)}, "without gaps"),
        ({"versions": (VersionSpan(0, 1, 1), VersionSpan(0, 2, 1))}, "without gaps"),
        ({"prompt_ids": [1, "x"]}, "prompt_ids"),
    ],
)
def test_a_generation_that_contradicts_itself_leaves_no_trace(changes: dict[str, object], words: str):
    recorder = two_turns()
    recorder.add_messages([tool("z")])
    before = recorder.freeze()
    with pytest.raises(BackendError, match=words):
        recorder.add_call(Rendered([1, 2, 3, 10, 11, 20, 21, 22, 12, 4]), generation(1, 2, **changes), said())
    assert recorder.freeze() == before
    recorder.add_call(Rendered([1, 2, 3, 10, 11, 20, 21, 22, 12, 4], ((9, 10),)), generation(1, 2), said())
    assert [m["token_ids"] for m in recorder.messages(token_ids=True)][-2:] == [[4], [1, 2]]


def test_a_snapshot_does_not_grow():
    recorder = two_turns()
    frozen = recorder.freeze()
    before = orjson.dumps([frozen.messages(token_ids=True), frozen.segments(), frozen.ledger()])
    recorder.add_messages([tool("z")])
    recorder.add_call(Rendered([1, 2, 3, 10, 11, 20, 21, 22, 12, 4], ((9, 10),)), generation(1, 2), said())
    seen: list[bytes] = []
    thread = threading.Thread(
        target=lambda: seen.append(orjson.dumps([frozen.messages(token_ids=True), frozen.segments(), frozen.ledger()]))
    )
    thread.start()
    thread.join(10)
    assert seen == [before]


def test_lone_surrogates_and_nul_never_break_the_json():
    recorder = Recorder()
    recorder.add_messages([ChatMessage("user", "a\ud800b\0")])
    recorder.add_call(Rendered([1], ((0, 1),)), generation(2), said("\udfff", reasoning="\ud83d"))
    user, answer = orjson.loads(orjson.dumps(recorder.messages(token_ids=True)))
    assert (user["content"], answer["content"], answer["reasoning_content"]) == ("a\ufffdb\0", "\ufffd", "\ufffd")


def test_tool_calls_and_errors_are_exported_as_the_wire_type_has_them():
    recorder = Recorder()
    recorder.add_messages([USER])
    requests = (ToolRequest("1", "bash", {"command": "ls"}), ToolRequest("2", "bash", None, "not JSON"))
    recorder.add_call(Rendered([1], ((0, 1),)), generation(2), said(tool_requests=requests))
    calls = Message.model_validate(recorder.messages(token_ids=False)[1]).tool_calls
    assert [(c.id, c.arguments, c.error) for c in calls] == [("1", {"command": "ls"}, None), ("2", None, "not JSON")]


turns = st.lists(
    st.tuples(
        st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=3),  # ids of each new message
        st.lists(st.integers(0, 9), min_size=1, max_size=4),  # sampled
        st.booleans(),  # the history is rewritten before this turn
        st.booleans(),  # the renderer can tell the messages' ranges
    ),
    min_size=1,
    max_size=6,
)


@given(turns)
def test_segments_and_messages_agree_for_any_episode(script):
    recorder, ids, sampled = Recorder(), [], []
    for number, (observations, output, rewrite, spans_known) in enumerate(script):
        if rewrite and number:
            ids = [1000 + number, *ids]
        spans = []
        for observation in observations:
            spans.append((len(ids), len(ids) + len(observation)))
            ids = ids + observation
        recorder.add_messages([ChatMessage("user" if number == 0 else "tool", "t") for _ in observations])
        recorder.add_call(Rendered(list(ids), tuple(spans) if spans_known else ()), generation(*output), said())
        ids = ids + output
        sampled.append(output)
    segments, messages = recorder.segments(), recorder.messages(token_ids=True)
    got = [i for s in segments for i, m in zip(s["response_ids"], s["response_mask"], strict=True) if m]
    assert got == [i for output in sampled for i in output]
    last = segments[-1]
    assert last["prompt_ids"] + last["response_ids"] == ids
    for index, segment in enumerate(segments):
        whole = segment["prompt_ids"] + segment["response_ids"]
        parts = [i for m in messages if m["segment"] == index for i in m["token_ids"]]
        assert whole[len(whole) - len(parts) :] == parts
        assert len(parts) >= len(segment["response_ids"])
        if index == 0:
            assert parts == whole
