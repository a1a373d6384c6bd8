"""The process: how it starts, and that it is gone when it should be."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from .serving import Server, running, until


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prorl_gym.embedded", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def generate_in_background(server: Server) -> tuple[threading.Thread, list[Any]]:
    """A long request, running when this returns."""
    answers: list[Any] = []
    body = {"prompt": [1, 2, 3], "max_tokens": 2000, "ignore_eos": True, "n": 8}
    thread = threading.Thread(target=lambda: answers.append(server.call("/v1/completions", body)))
    thread.start()
    until(lambda: server.metric("num_requests_running") == 8, "the request runs")
    return thread, answers


def test_sigterm_ends_a_busy_server(tiny_model: Path, tmp_path: Path) -> None:
    with running(tiny_model, tmp_path) as server:
        thread, answers = generate_in_background(server)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 0
        assert time.monotonic() - began < 2
        thread.join(5)
    assert answers[0][0] == 503
    assert answers[0][1]["error"]["type"] == "ServiceUnavailableError"


def test_a_parent_that_dies_while_the_model_loads_is_noticed(tiny_model: Path, tmp_path: Path) -> None:
    with running(tiny_model, tmp_path) as server:
        server.held.close()
        assert server.process.wait(10) == -signal.SIGTERM
        assert not (tmp_path / "address").exists()


def test_what_cannot_be_served_is_said_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = start("--model", str(tmp_path), "--port", str(port))
    assert refused.returncode == 2
    assert f"--port {port}: Address already in use" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(("arguments", "message"), [(["--max-num-seqs", "0"], "--max-num-seqs"), ([], "--model")])
def test_bad_options_are_refused_without_loading_anything(arguments: list[str], message: str) -> None:
    refused = start(*arguments)
    assert refused.returncode == 2
    assert message in refused.stderr
