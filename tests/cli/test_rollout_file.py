"""The output file: what is kept, what is made again, what is refused."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from prorl_gym.commands.rollout_file import RolloutFile, read_assignments
from prorl_gym.errors import ConfigError
from prorl_gym.types import JobResult, JobStatus


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a"}\n\n{"question": "b"}\n')
    return path


def result(**fields: Any) -> JobResult:
    return JobResult(job_id="j", task="words", status=JobStatus.COMPLETED, **{"reward": 1.0, **fields})


def test_repeats_of_every_row_the_first_ones_first(rows: Path) -> None:
    assert [each.key for each in read_assignments(rows, 2)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [each.key for each in read_assignments(rows, 1, limit=1)] == [(0, 0)]


@pytest.mark.parametrize(
    ("text", "message"), [("{}\n[1]\n", ":2: a JSON object"), ("{\n", ":1: not JSON"), ("\n", "no rows")]
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_assignments(tmp_path / "bad.jsonl", 1)


def test_a_torn_line_and_a_masked_result_are_made_again(rows: Path, tmp_path: Path) -> None:
    assignments = read_assignments(rows, 2)
    output = tmp_path / "new folder" / "out.jsonl"
    with RolloutFile(output, assignments) as file:
        file.add(assignments[0], result())
        file.add(assignments[1], result(reward=None, mask_sample=True))
        file.add(assignments[2], result(reward=0.0))
    with output.open("ab") as torn:
        torn.write(output.read_bytes()[:40])
    with RolloutFile(output, assignments) as file:
        assert [each.key for each in file.open_assignments] == [(1, 0), (1, 1)]
        assert [facts.reward for facts in file.results.values()] == [1.0, 0.0]
        file.add(assignments[1], result())
    lines = [orjson.loads(line) for line in output.read_bytes().splitlines()]
    assert [(line["_ng_task_index"], line["_ng_rollout_index"]) for line in lines] == [(0, 0), (0, 1), (1, 0)]


def test_the_file_of_another_input_is_left_alone(rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with RolloutFile(output, read_assignments(rows, 1)) as file:
        file.add(file.open_assignments[0], result())
    rows.write_text('{"question": "other"}\n')
    for content, message in (
        (output.read_bytes(), "belongs to another input"),
        (b'{"a": 1}\n', "is no result of this"),
    ):
        output.write_bytes(content)
        with pytest.raises(ConfigError, match=message), RolloutFile(output, read_assignments(rows, 1)):
            pass
        assert output.read_bytes() == content
