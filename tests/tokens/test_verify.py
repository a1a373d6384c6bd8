"""`verify` passes what the recorder wrote and names the line and the field of anything that was changed afterwards."""

import subprocess
import sys

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.commands.verify import verify_command
from prorl_gym.errors import ConfigError
from prorl_gym.tokens.recorder import Recorder
from prorl_gym.tokens.records import ChatMessage, Generation, Parsed, Rendered, VersionSpan
from prorl_gym.tokens.verify import verify_result
from prorl_gym.types import JobResult, JobStatus


def call(recorder: Recorder, prompt: Rendered, ids: list[int], *versions: VersionSpan, agent: str = "main") -> None:
    spans = versions or (VersionSpan(0, len(ids), 3),)
    generation = Generation(ids, [-0.25 - i / 16 for i in range(len(ids))], "stop", spans, "http://engine")
    recorder.add_call(prompt, generation, Parsed(ChatMessage("assistant", "a"), complete=True), agent=agent)


def result() -> dict:
    """Three calls of one agent in two segments, and one call of another agent."""
    recorder = Recorder()
    recorder.add_messages([ChatMessage("system", "s"), ChatMessage("user", "u")])
    call(recorder, Rendered([1, 2, 3], ((0, 1), (1, 3))), [10, 11], VersionSpan(0, 1, 3), VersionSpan(1, 2, 4))
    recorder.add_messages([ChatMessage("tool", "x"), ChatMessage("tool", "y")])
    call(recorder, Rendered([1, 2, 3, 10, 11, 20, 21, 22], ((5, 6), (6, 8))), [12])
    recorder.add_messages([ChatMessage("user", "again")])
    call(recorder, Rendered([1, 2, 9, 12, 30, 31], append_only=False), [13, 14])
    recorder.add_messages([ChatMessage("user", "sub")], agent="sub")
    call(recorder, Rendered([7, 8]), [15], agent="sub")
    fields = {
        "job_id": "j1",
        "task": "t",
        "status": JobStatus.COMPLETED,
        "reward": 1.0,
        "messages": recorder.messages(),
        "segments": recorder.segments(),
        "ledger": recorder.ledger(),
        "policy_versions": recorder.policy_versions(),
    }
    return orjson.loads(orjson.dumps(JobResult.model_validate(fields).model_dump(mode="json")))


def write(path, *rows: dict) -> str:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return str(path)


def test_what_the_recorder_wrote_holds():
    verdict = verify_result(result())
    assert verdict.problems == ()
    assert (verdict.calls, verdict.sampled_tokens, verdict.tokens) == (4, 6, 9 + 8 + 3)


def swap_calls(row):
    row["ledger"][0], row["ledger"][1] = row["ledger"][1], row["ledger"][0]


def swap_segments(row):
    row["segments"].reverse()


def set_at(*path):
    def change(row):
        *way, last, value = path
        for key in way:
            row = row[key]
        row[last] = value

    return change


def pop_at(*path):
    def change(row):
        for key in path:
            row = row[key]
        row.pop()

    return change


TAMPERINGS = {
    "prompt id": (set_at("segments", 0, "prompt_ids", 0, 99), "ledger[0].digest"),
    "sampled id": (set_at("segments", 0, "response_ids", 1, 99), "ledger[0].output_ids[1]"),
    "observed id": (set_at("segments", 0, "response_ids", 3, 99), "ledger[1].digest"),
    "id in both": (
        lambda row: (
            set_at("segments", 0, "response_ids", 1, 99)(row),
            set_at("ledger", 0, "output_ids", 1, 99)(row),
        ),
        "ledger[0].digest",
    ),
    "mask on": (set_at("segments", 0, "response_mask", 3, 1), "segments[0].versions"),
    "mask off": (set_at("segments", 0, "response_mask", 1, 0), "segments[0].logprobs[1]"),
    "mask two": (set_at("segments", 0, "response_mask", 1, 2), "segments[0].response_mask[1]"),
    "a boolean for a mask": (set_at("segments", 0, "response_mask", 1, True), "segments[0].response_mask[1]"),
    "logprob count": (pop_at("segments", 0, "logprobs"), "segments[0].logprobs"),
    "logprob count in the ledger": (pop_at("ledger", 2, "logprobs"), "ledger[2].logprobs"),
    "logprob": (set_at("segments", 0, "logprobs", 0, -9.0), "ledger[0].logprobs"),
    "logprob null": (set_at("segments", 0, "logprobs", 0, None), "segments[0].logprobs[0]"),
    "logprob positive": (set_at("segments", 0, "logprobs", 0, 0.5), "segments[0].logprobs[0]"),
    "version": (set_at("segments", 0, "versions", 0, 2, 9), "segments[0].versions"),
    "version span": (set_at("segments", 0, "versions", 2, 0, 4), "segments[0].versions"),
    "version range": (set_at("policy_versions", "min", 0), "policy_versions"),
    "digest": (set_at("ledger", 1, "digest", "00" * 32), "ledger[1].digest"),
    "prompt length": (set_at("ledger", 1, "new_prompt_tokens", 2), "ledger[1].prompt_tokens"),
    "agent": (set_at("segments", 0, "agent", "other"), "ledger[0].agent"),
    "swapped calls": (swap_calls, "ledger[0].call"),
    "swapped segments": (swap_segments, "segments[0].num_turns"),
    "missing call": (pop_at("ledger"), "segments[2].num_turns"),
    "missing ledger": (set_at("ledger", None), "ledger"),
    "missing segment": (pop_at("segments"), "ledger[3].segment"),
    "message id": (set_at("messages", 0, "token_ids", 0, 99), "messages"),
    "input id": (set_at("messages", 2, "input_ids", 0, 99), "messages[2].input_ids"),
    "output id": (set_at("messages", 2, "output_ids", 0, 99), "messages[2].output_ids"),
    "message order": (lambda row: row["messages"].reverse(), "messages[0].segment"),
    "reward": (set_at("reward", "one"), "reward"),
    "segments no list": (set_at("segments", {}), "segments"),
    "segment no object": (set_at("segments", 0, 5), "segments[0]"),
    "id no number": (set_at("segments", 0, "prompt_ids", 0, "1"), "segments[0].prompt_ids[0]"),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_tampered_row_is_found_with_its_line_and_field(name, tmp_path, capsys):
    change, field = TAMPERINGS[name]
    sound, row = result(), result()
    change(row)
    row["job_id"] = "j2"
    path = write(tmp_path / "rollouts.jsonl", sound, row)
    assert verify_command([path]) == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{path}:")]
    assert problems[0].startswith(f"{path}:2: {field}: "), problems
    assert not any(line.startswith(f"{path}:1:") for line in problems)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_changed_number_is_found_and_no_shape_of_a_row_raises(data):
    row = result()
    segment = row["segments"][data.draw(st.integers(0, len(row["segments"]) - 1))]
    key = data.draw(st.sampled_from(["prompt_ids", "response_ids", "response_mask", "logprobs"]))
    at = data.draw(st.integers(0, len(segment[key]) - 1))
    before = segment[key][at]
    value = data.draw(
        st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=1))
    )
    segment[key][at] = value
    same = value == before and (type(value) is type(before) or key == "logprobs")
    assert bool(verify_result(row).problems) == (not same)


def test_a_row_without_token_ids_in_its_messages_is_checked_by_its_segments():
    row = result()
    for message in row["messages"]:
        for key in ("token_ids", "input_ids", "output_ids", "logprobs"):
            message[key] = None
    assert verify_result(row).problems == ()


def test_a_failed_job_without_calls_holds():
    failed = {"job_id": "j", "status": "failed", "segments": [], "ledger": None, "messages": [], "reward": None}
    assert verify_result(failed).problems == ()


def test_the_table_counts_and_a_sound_file_exits_0(tmp_path, capsys):
    path = write(tmp_path / "r.jsonl", result(), result() | {"job_id": "j2"})
    assert verify_command([path]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["file", "rows", "calls", "sampled", "tokens", "tokens", "problems"]
    assert row.split() == [path, "2", "8", "12", "40", "0"]


def test_a_job_that_stands_twice_and_a_torn_line_are_problems(tmp_path, capsys):
    path = write(tmp_path / "r.jsonl", result(), result())
    with open(path, "ab") as file:
        file.write(b'{"job_id": "j3", "segm')
    assert verify_command([path]) == 1
    out = capsys.readouterr().out
    assert ":2: job_id: 'j1' stands on line 1 already" in out
    assert ":3: line: is no JSON" in out


@pytest.mark.parametrize("content", [None, b"", b"not json\n", b"[1]\n", b"\xff\xfe\x00"])
def test_what_is_no_rollout_file_exits_2(content, tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    if content is not None:
        path.write_bytes(content)
    sound = write(tmp_path / "sound.jsonl", result())
    assert verify_command([sound, str(path)]) == 2
    captured = capsys.readouterr()
    assert f"cannot read {path}" in captured.err
    assert sound in captured.out


def test_no_file_is_a_usage_error():
    with pytest.raises(ConfigError, match="names of rollout files"):
        verify_command([])


def test_the_command_line_runs_it(tmp_path):
    row = result()
    row["segments"][0]["response_ids"][0] += 1
    path = write(tmp_path / "r.jsonl", row)
    done = subprocess.run(
        [sys.executable, "-m", "prorl_gym", "verify", path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert f"{path}:1: ledger[0].output_ids[0]" in done.stdout
