"""The service's own endpoints."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import aiohttp
import pytest

from prorl_gym.errors import ConfigError
from prorl_gym.runtimes.base import SandboxSpec
from prorl_gym.server.http_server import HttpServer
from prorl_gym.server.listener import address_of, bind, published
from prorl_gym.server.service import Service
from prorl_gym.testing import Reply, ScriptedLlm
from prorl_gym.types import LlmServer, ServerStatus

from .conftest import Client, Serving, make_config, until


async def test_status_counts_jobs_and_pools(client: Client) -> None:
    await client.process("noop")
    await client.post("/jobs", {"task": "slow", "instance": {}})
    await until(lambda: client.service.pipeline.snapshot().active_run == 1)
    _, body = await client.get("/status")
    status = ServerStatus.model_validate(body)
    assert status.status == "running"
    assert status.total == 2
    assert (status.jobs["completed"], status.jobs["run"]) == (1, 1)
    assert status.pools["run"]["workers"] == client.service.config.pipeline.run.workers
    assert status.instance_id
    assert (status.llm_servers, status.leftovers) == ([], [])


async def test_stop_ends_jobs_and_start_begins_again(client: Client) -> None:
    """L-02, the part of /stop."""
    waiting = asyncio.create_task(client.process("slow", job_id="s"))
    await until(lambda: client.service.pipeline.snapshot().active_run == 1)
    began = time.monotonic()
    assert (await client.post("/stop"))[1]["status"] == "stopped"
    assert time.monotonic() - began < 5
    assert (await waiting)["status"] == "cancelled"
    status, error = await client.post("/process", {"task": "noop", "instance": {}})
    assert (status, error["error"]["type"]) == (503, "NotRunning")
    assert (await client.get("/ready"))[0] == 503
    assert (await client.get("/health"))[0] == 200
    assert (await client.get("/jobs/s"))[1]["status"] == "cancelled"
    assert (await client.post("/stop", {}))[0] == 200
    for _ in range(2):
        assert (await client.post("/start"))[1]["status"] == "running"
    assert (await client.get("/ready"))[0] == 200
    assert (await client.process("noop"))["status"] == "completed"


async def test_stop_can_wait_for_the_jobs(client: Client) -> None:
    waiting = asyncio.create_task(client.process("slow", instance={"seconds": 0.2}))
    await until(lambda: client.service.pipeline.snapshot().active_run == 1)
    assert (await client.post("/stop", {"drain": True, "deadline_s": 30}))[0] == 200
    assert (await waiting)["status"] == "completed"
    await client.post("/start")
    waiting = asyncio.create_task(client.process("slow"))
    await until(lambda: client.service.pipeline.snapshot().active_run == 1)
    assert (await client.post("/stop", {"drain": True, "deadline_s": 0.1}))[0] == 200
    assert (await waiting)["status"] == "cancelled"
    status, error = await client.post("/stop", {"deadline_s": 3})
    assert (status, error["error"]["field"]) == (400, "deadline_s")


async def test_pools_wait_for_start_without_autostart(serving: Serving) -> None:
    async with serving(server={"port": 0, "autostart": False}) as client:
        assert (await client.get("/status"))[1]["status"] == "stopped"
        assert (await client.post("/jobs", {"task": "noop", "instance": {}}))[0] == 503
        await client.post("/start")
        assert (await client.process("noop"))["status"] == "completed"


async def test_pools_are_resized_while_they_work(serving: Serving) -> None:
    async with serving(pipeline={"run": {"workers": 1}, "ready_ahead": 8}) as client:
        for _ in range(3):
            await client.post("/jobs", {"task": "slow", "instance": {}})
        await until(lambda: client.service.pipeline.snapshot().run_queue == 2)
        status, pools = await client.ask("PATCH", "/pools", {"run": 3})
        assert (status, pools["run"]["workers"]) == (200, 3)
        await until(lambda: client.service.pipeline.snapshot().active_run == 3)
        for body in ({}, {"run": 0}, {"walk": 1}, {"run": "many"}):
            assert (await client.ask("PATCH", "/pools", body))[0] == 400


async def test_backends_come_and_go(client: Client) -> None:
    async with ScriptedLlm(Reply(text="hi")) as llm:
        status, added = await client.post("/add_llm_server", {"address": llm.address, "policy_version": 1})
        server = LlmServer.model_validate(added)
        assert (status, server.healthy, server.policy_version, server.model) == (200, True, 1, "scripted")
        _, added = await client.post("/add_llm_server", {"address": llm.address + "/v1", "policy_version": 2})
        assert added["policy_version"] == 2
        await client.post("/add_llm_server", {"address": llm.address, "policy": "other"})
        _, servers = await client.get("/llm_servers")
        assert [(each["policy"], each["policy_version"]) for each in servers] == [("default", 2), ("other", None)]
        _, status_body = await client.get("/status")
        assert len(status_body["llm_servers"]) == 2
        assert len((await client.post("/clear_llm_server"))[1]) == 1
        assert [each["policy"] for each in (await client.get("/llm_servers"))[1]] == ["other"]
        remove = {"address": llm.address, "policy": "other"}
        assert (await client.post("/remove_llm_server", remove))[1] == {"removed": True}
        assert (await client.post("/remove_llm_server", remove))[1] == {"removed": False}
    _, added = await client.post("/add_llm_server", {"address": llm.address})
    assert added["healthy"] is False
    assert added["detail"]
    for body in ({}, {"address": ""}, {"address": "ftp://x"}, {"address": llm.address, "in_flight": 1},
                 {"address": llm.address, "api_key_env": "PRORL_GYM_TEST_UNSET"}):  # fmt: skip
        assert (await client.post("/add_llm_server", body))[0] == 400
    assert (await client.post("/clear_llm_server", {"in_flight": "explode"}))[0] == 400


async def test_token_is_asked_for_everywhere_but_at_health(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_GYM_TEST_TOKEN", "s3cret-token")
    async with serving(server={"port": 0, "token_env": "PRORL_GYM_TEST_TOKEN"}) as client:
        wrong = ("Bearer wrong", "s3cret-token", "Basic s3cret-token", "Bearer s3cret-\u00e9")
        for path in ("/status", "/metrics", "/docs", "/openapi.json", "/nope", "/jobs/x/events"):
            for headers in ({}, *({"authorization": value} for value in wrong)):
                async with client.session.get(client.address + path, headers=headers) as response:
                    assert response.status == 401
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert (await response.json())["error"]["type"] == "Unauthorized"
        assert (await client.get("/health"))[0] == 200
        headers = {"authorization": "Bearer s3cret-token"}
        assert (await client.get("/status", headers=headers))[0] == 200
        _, document = await client.get("/openapi.json", headers=headers)
        assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"


async def test_a_sandbox_on_the_hosts_network_cannot_command_the_service(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_GYM_TEST_TOKEN", "s3cret-token")
    async with serving(server={"port": 0, "token_env": "PRORL_GYM_TEST_TOKEN"}) as client:
        port = client.address.rpartition(":")[2]
        attack = (
            f"exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'POST /stop HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
            "Content-Type: application/json\r\nConnection: close\r\n\r\n' >&3; head -n 1 <&3; exec 3>&-; env"
        )
        async with client.service.sandbox(SandboxSpec("local", network="host")) as box:
            reply = await box.call("bash", {"command": attack}, timeout_s=10)
        assert reply.text.startswith("HTTP/1.1 401"), reply.text
        assert "s3cret" not in reply.text
        assert client.service.pipeline.state == "running"


async def test_metrics_are_prometheus_text(client: Client) -> None:
    await client.process("noop")
    async with client.session.get(client.address + "/metrics") as response:
        assert response.content_type == "text/plain"
        lines = (await response.text()).splitlines()
    assert "prorl_gym_jobs_total 1.0" in lines
    assert 'prorl_gym_jobs_by_status{status="completed"} 1.0' in lines
    assert 'prorl_gym_stage_active{stage="run"} 0.0' in lines
    assert "prorl_gym_running 1.0" in lines


async def test_openapi_describes_every_endpoint(client: Client) -> None:
    _, document = await client.get("/openapi.json")
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described >= {
        ("POST", "/process"), ("POST", "/cancel"), ("POST", "/add_llm_server"), ("POST", "/clear_llm_server"),
        ("POST", "/remove_llm_server"), ("POST", "/start"), ("POST", "/stop"), ("GET", "/status"), ("POST", "/jobs"),
        ("GET", "/jobs/{job_id}"), ("GET", "/jobs/{job_id}/events"), ("GET", "/llm_servers"), ("PATCH", "/pools"),
        ("GET", "/environments"), ("GET", "/health"), ("GET", "/ready"), ("GET", "/metrics"),
    }  # fmt: skip
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["summary"] and operation["description"], path
            assert "422" not in operation["responses"]
    request = document["components"]["schemas"]["JobRequest"]["properties"]
    assert "idempotent" in request["job_id"]["description"]
    async with client.session.get(client.address + "/docs") as response:
        assert response.status == 200


async def test_environments_lists_the_tasks(client: Client) -> None:
    _, body = await client.get("/environments")
    assert "noop" in body["tasks"]


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_answers_are_not_held_back(tmp_path: Path, kind: str) -> None:
    """TCP_NODELAY is set on what is accepted, and many answers on one connection take no 40 ms each."""

    async def run() -> float:
        config = make_config(tmp_path)
        service = Service(config)
        listener = bind(config.server, has_token=False)
        await service.start()
        http = HttpServer(service, listener)
        await http.start()
        try:
            async with aiohttp.ClientSession() as session:
                began = time.monotonic()
                for _ in range(20):
                    async with session.get(http.address + "/health") as response:
                        await response.read()
                elapsed = time.monotonic() - began
                (connection,) = http._uvicorn.server_state.connections
                accepted = connection.transport.get_extra_info("socket")
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        finally:
            await service.stop()
            await http.stop()
            listener.close()
        return elapsed

    import uvloop

    factory = uvloop.new_event_loop if kind == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        assert runner.run(run()) < 20 * 0.04


def test_bind_says_what_is_wrong(tmp_path: Path) -> None:
    config = make_config(tmp_path).server
    taken = bind(config, has_token=False)
    taken.listen()
    port = taken.getsockname()[1]
    assert address_of(taken) == f"http://127.0.0.1:{port}"
    with taken, pytest.raises(ConfigError, match=rf"server\.port={port} is in use.*server\.port="):
        bind(config.model_copy(update={"port": port}), has_token=False)
    everywhere = config.model_copy(update={"host": "0.0.0.0"})
    with pytest.raises(ConfigError, match=r"server\.token_env=.*server\.insecure=true"):
        bind(everywhere, has_token=False)
    bind(everywhere, has_token=True).close()
    bind(everywhere.model_copy(update={"insecure": True}), has_token=False).close()
    with pytest.raises(ConfigError, match=r"server\.host=nowhere\.invalid"):
        bind(config.model_copy(update={"host": "nowhere.invalid"}), has_token=False)


def test_address_file_is_whole_and_goes_away(tmp_path: Path) -> None:
    file = tmp_path / "new" / "address"
    with published("http://a:1", file):
        assert file.read_text().strip() == "http://a:1"
    assert list(file.parent.iterdir()) == []
    with published("http://a:1", file):
        file.write_text("http://another:2\n")
    assert file.read_text() == "http://another:2\n"
    with pytest.raises(ConfigError, match="address_file"), published("http://a:1", Path("/proc/nope/address")):
        pass


def test_host_network_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"runtime": {"kind": "bubblewrap", "network": "host"}}
    with pytest.raises(ConfigError, match="token_env"):
        Service(make_config(tmp_path, **changes))
    environment = {"name": "x_agent", "agent_type": "x", "agent": {"sandbox": {"network": "host"}}}
    with pytest.raises(ConfigError, match="x_agent"):
        Service(make_config(tmp_path, environments=[environment]))
    environment["agent"] = {"sandbox": {"setup_network": "host", "setup": ["true"]}}
    with pytest.raises(ConfigError, match="x_agent"):
        Service(make_config(tmp_path, environments=[environment]))
    with pytest.raises(ConfigError, match="PRORL_GYM_TEST_TOKEN"):
        Service(make_config(tmp_path, server={"token_env": "PRORL_GYM_TEST_TOKEN"}))
    monkeypatch.setenv("PRORL_GYM_TEST_TOKEN", "s3cret-token")
    Service(make_config(tmp_path, server={"token_env": "PRORL_GYM_TEST_TOKEN"}, **changes))
    Service(make_config(tmp_path, server={"insecure": True}, **changes))
