"""The input of rows and the output of results, one JSON object per line.

The invariant: an output line is whole or not there, and each names the row and the repeat it belongs to, so that an
interrupted file can be continued.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import orjson
from pydantic import ValidationError

from prorl_gym.commands.rollout_table import RolloutFacts
from prorl_gym.errors import ConfigError
from prorl_gym.types import JobResult

ROW_INDEX = "_ng_task_index"
REPEAT_INDEX = "_ng_rollout_index"
"""NeMo Gym's names."""
ROW_DIGEST = "_row_digest"


@dataclass(frozen=True, slots=True)
class Assignment:
    """One rollout to make: a row, and which of its repeats."""

    row: int
    repeat: int
    instance: dict[str, Any]
    digest: str

    @property
    def key(self) -> tuple[int, int]:
        """What identifies it within one input file."""
        return self.row, self.repeat


def read_assignments(path: Path, num_repeats: int, limit: int | None = None) -> list[Assignment]:
    """Every repeat of the file's first `limit` rows, the first repeats first.

    Raises:
        ConfigError: No such file, or a line that is no JSON object; names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise ConfigError(f"input: cannot read {path}: {e.strerror}") from None
    rows: list[tuple[dict[str, Any], str]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append((_row(line, path, number), hashlib.sha256(line.strip()).hexdigest()[:16]))
        if limit is not None and len(rows) == limit:
            break
    if not rows:
        raise ConfigError(f"input: {path} holds no rows")
    return [
        Assignment(index, repeat, row, digest)
        for repeat in range(num_repeats)
        for index, (row, digest) in enumerate(rows)
    ]


def _row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as e:
        raise ConfigError(f"input: {path}:{number}: not JSON: {e}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"input: {path}:{number}: a JSON object is expected, not {type(row).__name__}")
    return row


class RolloutFile:
    """The output; a context manager that holds the file open for appending.

    A file that is there already is continued: whole lines that measured something are kept, a torn last line and
    results whose sample is masked are dropped, and so made again.
    """

    def __init__(self, path: Path, assignments: Iterable[Assignment]) -> None:
        self.path = path
        self._wanted = {assignment.key: assignment for assignment in assignments}
        self._file: BinaryIO | None = None
        self.results: dict[tuple[int, int], RolloutFacts] = {}
        """Of every line in the file, by row and repeat."""

    @property
    def open_assignments(self) -> list[Assignment]:
        """What is still to be made, in order."""
        return [assignment for key, assignment in self._wanted.items() if key not in self.results]

    def add(self, assignment: Assignment, result: JobResult) -> None:
        """Append one result; what it holds is on its way to the disk when this returns."""
        head = {ROW_INDEX: assignment.row, REPEAT_INDEX: assignment.repeat, ROW_DIGEST: assignment.digest}
        assert self._file is not None  # noqa: S101 - used within the block only
        self._file.write(orjson.dumps({**head, **result.model_dump(mode="json")}) + b"\n")
        self._file.flush()
        self.results[assignment.key] = RolloutFacts.of(result)

    def __enter__(self) -> Self:
        """Read what is there, drop what does not count, open for appending.

        Raises:
            ConfigError: The file belongs to another input, or cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._tidy()
            self._file = self.path.open("ab")
        except OSError as e:
            raise ConfigError(f"output: cannot write {self.path}: {e.strerror}") from None
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        if self._file is not None:
            self._file.close()

    def _tidy(self) -> None:
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = list(self._kept_lines(lines))
        if len(kept) == len(lines):
            return
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_bytes(b"".join(kept))
        temporary.replace(self.path)

    def _kept_lines(self, lines: list[bytes]) -> Iterator[bytes]:
        for number, line in enumerate(lines, 1):
            try:
                fields = orjson.loads(line) if line.endswith(b"\n") else None
                if fields is None:
                    continue  # torn: the writer was killed in the middle
                key = (fields[ROW_INDEX], fields[REPEAT_INDEX])
                digest = fields[ROW_DIGEST]
                result = JobResult.model_validate(fields)
            except (orjson.JSONDecodeError, KeyError, TypeError, ValidationError):
                raise ConfigError(f"output: {self.path}:{number} is no result of this command; name another") from None
            if key not in self._wanted or self._wanted[key].digest != digest:
                raise ConfigError(f"output: {self.path}:{number} belongs to another input, or to more rows")
            facts = RolloutFacts.of(result)
            if facts.reward is not None and key not in self.results:
                self.results[key] = facts
                yield line
