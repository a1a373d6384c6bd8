"""What the service writes, and what it never does."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest

from prorl_gym.config.models import LoggingConfig
from prorl_gym.logs import configure_logging, hide, log_context, redact

log = logging.getLogger("prorl_gym.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def configured() -> Iterator[Callable[..., io.StringIO]]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level

    def configure(stream: io.StringIO, **fields: str) -> io.StringIO:
        configure_logging(LoggingConfig.model_validate(fields), stream)
        return stream

    yield configure
    root.handlers[:] = before
    root.setLevel(level)


def test_json_lines_where_nobody_looks(configured: Callable[..., io.StringIO]) -> None:
    stream = configured(io.StringIO())
    log.warning("hello %s", "world\n", extra={"seconds": 3})
    record = json.loads(stream.getvalue())
    assert (record["level"], record["logger"], record["message"]) == ("WARNING", "prorl_gym.test", "hello world\n")
    assert record["seconds"] == 3
    assert record["time"].endswith("Z")


def test_text_on_a_terminal(configured: Callable[..., io.StringIO]) -> None:
    stream = configured(Terminal())
    with log_context(job_id="j1", stage="run"):
        log.info("hello")
    assert "INFO    prorl_gym.test [j1 run] hello\n" in stream.getvalue()


async def test_job_and_stage_are_in_each_record_of_a_job(configured: Callable[..., io.StringIO]) -> None:
    stream = configured(io.StringIO())

    async def work(job: str) -> None:
        with log_context(job_id=job):
            await asyncio.sleep(0)
            with log_context(stage="init"):
                log.info("a")
                await asyncio.to_thread(log.info, "b")
            log.info("c")

    await asyncio.gather(work("j1"), work("j2"))
    log.info("d")
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    seen = {(record.get("job_id"), record.get("stage"), record["message"]) for record in records}
    assert seen == {(job, *rest) for job in ("j1", "j2") for rest in (("init", "a"), ("init", "b"), (None, "c"))} | {
        (None, None, "d")
    }


def test_a_second_call_replaces_the_first(configured: Callable[..., io.StringIO]) -> None:
    first, second = configured(io.StringIO()), configured(io.StringIO(), level="ERROR")
    log.warning("no")
    log.error("yes")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1


def test_no_credential_is_written(configured: Callable[..., io.StringIO]) -> None:
    hide('p4ss"word\\')
    for stream in (configured(io.StringIO()), configured(Terminal())):
        configured(stream)
        log.info("header Authorization: Bearer abc.def-123 and api_key=sk-12345678abc")
        log.info("http://user:hunter22@host:8000/v1 says %s", 'p4ss"word\\', extra={"token": "tok3n-value"})
        try:
            raise ValueError('in a traceback: p4ss"word\\')
        except ValueError:
            log.exception("failed")
        text = stream.getvalue()
        for secret in ("abc.def", "12345678abc", "hunter22", "p4ss", "tok3n"):
            assert secret not in text
        assert "host:8000" in text


def test_ordinary_text_is_left_alone() -> None:
    line = '{"max_tokens": 4096, "token_env": "PRORL_TOKEN", "api_key_env": null, "url": "http://h:80", "mail": "a@b"}'
    assert redact(line) == line
