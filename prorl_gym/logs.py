"""How the service speaks: one handler on the root logger, readable on a terminal, JSON lines elsewhere.

Every record carries the job and the stage it was written in. No bearer token or key leaves through it: values that were
given to `hide` and whatever looks like a credential are blanked out of the finished line, tracebacks included.
"""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

from prorl_gym.config.models import LoggingConfig

_context: ContextVar[tuple[str | None, str | None]] = ContextVar("prorl_gym_log_context", default=(None, None))
_hidden: set[str] = set()

_CREDENTIALS = re.compile(
    r"(?i)\b(bearer\s+)[\w.~+/=-]{4,}"
    r"|(\b(?:api[_-]?key|token|secret|password)[\"']?\s*[=:]\s*[\"']?)[\w.~+/-]{8,}"
    r"|(://[^/\s:@\"]*:)[^/\s@\"]+(?=@)"
    r"|\b(sk-|hf_|ghp_)\w{8,}"
)
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message", "job_id", "stage"}
_COLOURS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}


def configure_logging(config: LoggingConfig, stream: TextIO | None = None) -> None:
    """Send everything that this process logs to `stream`, stderr when None; a second call replaces the first."""
    stream = stream or sys.stderr
    as_json = config.format == "json" or (config.format == "auto" and not stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter(colours=stream.isatty()))
    root = logging.getLogger()
    for old in [each for each in root.handlers if isinstance(each.formatter, _Formatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(config.level)
    for chatty in ("uvicorn.error", "asyncio", "httpx", "httpx2", "httpcore", "httpcore2", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[config.level]))
    logging.captureWarnings(True)
    for self_willed in ("huggingface_hub", "transformers"):
        _bring_into_line(logging.getLogger(self_willed))
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


class _BroughtIntoLine(logging.Logger):
    """The logger of a library that would print to stderr by itself: whatever it sets up, its records come to ours."""

    def addHandler(self, hdlr: logging.Handler) -> None:
        """Take no handler."""

    @property
    def propagate(self) -> bool:
        """Always."""
        return True

    @propagate.setter
    def propagate(self, wanted: bool) -> None:
        """Change nothing."""


def _bring_into_line(logger: logging.Logger) -> None:
    """Without an import of the library, which takes seconds and speaks already while it is imported."""
    logger.__dict__.pop("propagate", None)
    logger.__class__ = _BroughtIntoLine
    logger.handlers.clear()


@contextmanager
def log_context(*, job_id: str | None = None, stage: str | None = None) -> Iterator[None]:
    """Stamp what is logged within the block, in its tasks and threads too, with job and stage."""
    outer_job, outer_stage = _context.get()
    mark = _context.set((job_id or outer_job, stage or outer_stage))
    try:
        yield
    finally:
        _context.reset(mark)


def hide(secret: str | None) -> None:
    """Never let `secret` be logged. Values under 4 characters would blank out ordinary text, and are let through."""
    if secret and len(secret) >= 4:
        _hidden.update((secret, json.dumps(secret)[1:-1]))


def redact(text: str) -> str:
    """`text` without what was hidden and without what looks like a credential."""
    for secret in _hidden:
        text = text.replace(secret, "***")
    return _CREDENTIALS.sub(lambda match: "".join(part or "" for part in match.groups()) + "***", text)


class _Formatter(logging.Formatter):
    def job_and_stage(self, record: logging.LogRecord) -> tuple[str | None, str | None]:
        """From the record itself where it has them, else from where it was written."""
        job_id, stage = _context.get()
        return getattr(record, "job_id", None) or job_id, getattr(record, "stage", None) or stage

    def own_fields(self, record: logging.LogRecord) -> dict[str, Any]:
        return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


class TextFormatter(_Formatter):
    """`12:34:56 INFO  prorl_gym.server [job stage] message`."""

    def __init__(self, *, colours: bool = False) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        """One record, with its traceback below it."""
        job_id, stage = self.job_and_stage(record)
        where = f" [{' '.join(part for part in (job_id, stage) if part)}]" if job_id or stage else ""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname:<7} {record.name}{where} {record.getMessage()}"
        if fields := self.own_fields(record):
            line += " " + " ".join(f"{key}={value}" for key, value in fields.items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        line = redact(line)
        colour = _COLOURS.get(record.levelname) if self._colours else None
        return f"{colour}{line}\x1b[0m" if colour else line


class JsonFormatter(_Formatter):
    """One JSON object per line: time, level, logger, message, job_id, stage, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One record as one line."""
        job_id, stage = self.job_and_stage(record)
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "job_id": job_id,
            "stage": stage,
            **self.own_fields(record),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return redact(json.dumps({key: value for key, value in fields.items() if value is not None}, default=str))
