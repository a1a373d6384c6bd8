"""What the service writes, and what it never does."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from prorl_gym.config.models import LoggingConfig
from prorl_gym.logs import configure_logging, hide, log_context, redact

from .conftest import StartProcess, until

log = logging.getLogger("prorl_gym.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Hub(ThreadingHTTPServer):
    """A model hub that is out of order."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(503)
            self.send_header("content-length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, format: str, *args: object) -> None:
            pass


@pytest.fixture
def hub() -> Iterator[str]:
    with Hub(("127.0.0.1", 0), Hub.Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_what_the_hubs_libraries_say_is_json_like_everything_on_stderr(
    server_process: StartProcess, hub: str, tmp_path: Path
) -> None:
    server = server_process(
        policy={"model": "nobody/nothing"},
        environments=[{"name": "chat_agent", "agent_type": "tool_calling", "agent": {"sandbox": None}}],
        roots=[Path(__file__).parents[2]],
        environment={"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"},
    )
    await until(lambda: "Retrying in" in server.log.read_text(), timeout_s=60)
    server.process.terminate()
    assert await server.ended(10) == 0
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert {"huggingface_hub.utils._http", "prorl_gym.server.serve"} <= {line["logger"] for line in lines}


def test_warnings_and_self_willed_libraries_go_through_our_handler() -> None:
    code = (
        "import logging, sys, warnings\n"
        "logging.getLogger('transformers').addHandler(logging.StreamHandler())\n"
        "from prorl_gym.config.models import LoggingConfig\n"
        "from prorl_gym.logs import configure_logging\n"
        "configure_logging(LoggingConfig(level='WARNING'))\n"
        "configure_logging(LoggingConfig(level='WARNING'))\n"
        "warnings.warn('careful')\n"
        "from transformers.utils import logging as theirs\n"
        "theirs.set_verbosity_info(); theirs.enable_default_handler(); theirs.disable_propagation()\n"
        "theirs.get_logger('transformers.x').warning('hello')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["logger"], "careful" in line["message"]) for line in said if line["logger"] == "py.warnings"]
    assert [line["message"] for line in said if line["logger"] == "transformers.x"] == ["hello"]


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
