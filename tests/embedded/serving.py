"""Starts the embedded server as users do: its own process, real HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

DEADLINE_S = 60.0


def until(condition: Callable[[], Any], what: str, deadline_s: float = 20.0) -> Any:
    """Poll until `condition` is true; return its value."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.01)
    return value


@dataclass(frozen=True)
class Server:
    """A server process; `held` is the end of the watched pipe that is ours."""

    process: subprocess.Popen[str]
    address_file: Path
    held: BinaryIO

    @property
    def address(self) -> str:
        def written() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return self.address_file.exists()

        until(written, "the server listens", DEADLINE_S)
        return self.address_file.read_text()

    def call(self, path: str, body: Any = None, raw: bytes | None = None, **headers: str) -> tuple[int, Any]:
        """POST a body, or GET; return status and parsed reply."""
        payload = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, payload, {"Content-Type": "application/json", **headers})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=30) as response:
                text = response.read().decode()
                return response.status, json.loads(text) if text.startswith("{") else text
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def complete(self, prompt: Any, **params: Any) -> dict[str, Any]:
        """One completion that must succeed, with ids and logprobs."""
        body = {"prompt": prompt, "logprobs": 0, "return_token_ids": True, "max_tokens": 8, **params}
        status, reply = self.call("/v1/completions", body)
        assert status == 200, reply
        return reply

    def choice(self, prompt: Any, **params: Any) -> dict[str, Any]:
        """The only choice of one completion."""
        (choice,) = self.complete(prompt, **params)["choices"]
        return choice

    def metric(self, name: str) -> float:
        """One sample of /metrics."""
        _, text = self.call("/metrics")
        (line,) = [line for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]
        return float(line.rsplit(" ", 1)[1])


@contextlib.contextmanager
def running(model: Path, folder: Path, *flags: str) -> Iterator[Server]:
    """A server on `model`, started but perhaps still loading; ended at the latest on leaving."""
    watched, ours = os.pipe()
    held = os.fdopen(ours, "wb")
    address_file = folder / "address"
    command = [sys.executable, "-m", "prorl_gym.embedded", "--model", str(model), "--address-file", str(address_file)]
    # One thread: two would fight for the cores with everything else that tests run.
    command += ["--watch-fd", str(watched), "--dtype", "float32", "--device", "cpu", "--threads", "1", *flags]
    with subprocess.Popen(command, pass_fds=[watched], stderr=subprocess.PIPE, text=True) as process:
        os.close(watched)
        server = Server(process, address_file, held)
        try:
            yield server
        finally:
            held.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
