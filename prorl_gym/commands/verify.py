"""`verify`: checks rollout files token by token, offline."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from prorl_gym.errors import ConfigError
from prorl_gym.tokens.verify import Problem, verify_result

_SHOWN = 20
_HELP = """\
usage: python -m prorl_gym verify FILE [FILE ...]

Checks rollout files (.jsonl) offline: that each prompt begins with the prompt and the sampled ids before it, digests,
masks, lengths, log-probabilities, version spans, and that the ids of the messages are their segment.

Exit code: 0 all hold, 1 problems were found (each is printed with its line and field), 2 a file could not be read.
"""


@dataclass(slots=True)
class FileReport:
    """What was found in one file; `problems` are pairs of a line number, from 1, and a problem."""

    rows: int = 0
    calls: int = 0
    sampled_tokens: int = 0
    tokens: int = 0
    problems: list[tuple[int, Problem]] = field(default_factory=list)


def help_text() -> str:
    """How the command is used."""
    return _HELP


def verify_command(arguments: Sequence[str]) -> int:
    """Check the files, print a table and every problem.

    Raises:
        ConfigError: No file is named.
    """
    if not arguments or any(argument.startswith("-") for argument in arguments):
        raise ConfigError(f"verify takes the names of rollout files\n{_HELP}")
    reports: dict[str, FileReport] = {}
    unreadable: dict[str, str] = {}
    for name in arguments:
        try:
            reports[name] = verify_file(Path(name))
        except (OSError, ValueError) as error:
            unreadable[name] = getattr(error, "strerror", None) or str(error)
    for line in _table(reports):
        sys.stdout.write(line + "\n")
    for name, report in reports.items():
        for number, problem in report.problems[:_SHOWN]:
            sys.stdout.write(f"{name}:{number}: {problem.field}: {problem.message}\n")
        if len(report.problems) > _SHOWN:
            sys.stdout.write(f"{name}: {len(report.problems) - _SHOWN} more\n")
    for name, reason in unreadable.items():
        sys.stderr.write(f"error: cannot read {name}: {reason}\n")
    if unreadable:
        return 2
    return 1 if any(report.problems for report in reports.values()) else 0


def verify_file(path: Path) -> FileReport:
    """Check every line of a rollout file.

    Raises:
        OSError: It cannot be read.
        ValueError: Nothing in it is a result.
    """
    report = FileReport()
    job_ids: dict[object, int] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                result = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                report.problems.append((number, Problem("line", f"is no JSON: {error}")))
                continue
            if not isinstance(result, dict) or "segments" not in result:
                report.problems.append((number, Problem("line", "is no job result: it has no segments")))
                continue
            verdict = verify_result(result)
            report.rows += 1
            report.calls += verdict.calls
            report.sampled_tokens += verdict.sampled_tokens
            report.tokens += verdict.tokens
            report.problems.extend((number, problem) for problem in verdict.problems)
            job_id = result.get("job_id")
            if isinstance(job_id, str) and job_ids.setdefault(job_id, number) != number:
                repeated = Problem("job_id", f"{job_id!r} stands on line {job_ids[job_id]} already")
                report.problems.append((number, repeated))
    if not report.rows:
        raise ValueError(f"no line is a job result (of {len(report.problems)})")
    return report


def _table(reports: dict[str, FileReport]) -> Iterator[str]:
    header = ("file", "rows", "calls", "sampled tokens", "tokens", "problems")
    rows = [
        (name, *(f"{n:,}" for n in (r.rows, r.calls, r.sampled_tokens, r.tokens, len(r.problems))))
        for name, r in reports.items()
    ]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows) if rows else ():
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *cells])
