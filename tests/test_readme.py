"""The README's blocks, run as they are printed. Ports that are taken on this machine are replaced, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.testing import Conversation, Reply, Script, ScriptedLlm

README = (Path(__file__).parent.parent / "README.md").read_text()
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if key != "PRORL_GYM_ROOTS"},
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
}
START_S = 100.0  # the first start on a machine makes the tool environment


def block(label: str) -> str:
    found = re.findall(rf"^```{re.escape(label)}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"README has {len(found)} blocks {label!r}"
    return str(found[0])


def shell(text: str, cwd: Path, timeout_s: float = 60.0) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise AssertionError("no free port")


@dataclass(frozen=True)
class Ports:
    """What stands for the ports that the README shows."""

    service: int
    engine: int

    def of(self, text: str) -> str:
        return text.replace("8006", str(self.service)).replace("8000", str(self.engine))


@pytest.fixture(scope="module")
def ports(scripted_model: str) -> Iterator[Ports]:
    """A scripted engine that always gives the right answer, on the port that the README shows."""
    script = Script(
        replies=(Reply(text=r"It is \boxed{42}."),),
        conversations=(Conversation("stressed", (Reply(text="desserts"),)),),
    )
    llm = ScriptedLlm(script, model=scripted_model, port=free_port(8000))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(llm.start(), loop).result(20)
    try:
        yield Ports(free_port(8006), int(llm.address.rsplit(":", 1)[1]))
    finally:
        asyncio.run_coroutine_threadsafe(llm.stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


@pytest.fixture(scope="module")
def service(ports: Ports, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    """The service, started by the README's own command."""
    command = ports.of(block("bash serve")).strip()
    if ports.service != 8006:
        command += f" server.port={ports.service}"
    folder = tmp_path_factory.mktemp("service")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            with contextlib.suppress(OSError):
                with urllib.request.urlopen(f"http://127.0.0.1:{ports.service}/ready", timeout=5) as ready:
                    assert ready.status == 200
                break
            time.sleep(0.05)
        yield ports
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, (folder / "log").read_text()


def json_values(text: str) -> list[Any]:
    values, rest = [], text.strip()
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        values.append(value)
        rest = rest[end:].strip()
    return values


def test_curl(service: Ports, tmp_path: Path) -> None:
    answers = json_values(shell(service.of(block("bash curl")), tmp_path))
    status, server, result, accepted, view, cancelled, pools = answers
    assert status["status"] == "running"
    assert (server["healthy"], server["policy_version"]) == (True, 1)
    assert (result["status"], result["reward"], result["job_id"]) == ("completed", 1.0, "run7-step1-0")
    assert result["segments"][0]["versions"][0][2] == 1
    assert accepted["job_id"] == "run7-step1-1"
    assert view["result"]["reward"] == 1.0
    assert sorted(cancelled["already_ended"]) == ["run7-step1-0", "run7-step1-1"]
    assert pools["run"]["workers"] == 64


def test_client(service: Ports, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(service.of(block("python client")))
    prompt_tokens, sampled_tokens, reward = shell("python client.py", tmp_path).split()
    assert int(prompt_tokens) > 0
    assert int(sampled_tokens) > 0
    assert reward == "1.0"


def test_environment(ports: Ports, tmp_path: Path) -> None:
    text = block("bash environment")
    assert len(text.splitlines()) <= 40
    assert "backwards_agent" in shell(text, tmp_path)
    row = {"question": "Spell stressed backwards: stressed", "expected_answer": "", "agent_ref": {"name": "backwards"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    shell(
        "PRORL_GYM_ROOTS=my_envs python -m prorl_gym rollout input=rows.jsonl output=out.jsonl "
        f"'environment=[backwards]' runtime=local 'paths.state=\"{tmp_path}/state\"' "
        f"'backend.addresses=[\"http://127.0.0.1:{ports.engine}\"]'",
        tmp_path,
        timeout_s=START_S,
    )
    (result,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (result["task"], result["reward"], result["resolved"]) == ("backwards_agent", 1.0, True)


def test_rollout(ports: Ports, tmp_path: Path) -> None:
    row = {"question": "What is 6 times 7?", "expected_answer": "42", "agent_ref": {"name": "math_agent"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    shell(ports.of(block("bash rollout")), tmp_path, timeout_s=START_S)
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [result["reward"] for result in results] == [1.0] * 4
