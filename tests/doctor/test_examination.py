"""What doctor finds on this host, and that what does not hold is found."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from prorl_gym.config.models import BackendConfig, PathsConfig, PolicyConfig, ProrlConfig, RuntimeConfig
from prorl_gym.doctor import examination, host, limits, network, orphans, speed
from prorl_gym.doctor.examination import PAIR_CHECKS, SUBJECT_CHECKS, Examination
from prorl_gym.doctor.finding import Finding
from prorl_gym.doctor.limits import LIMIT_CHECKS
from prorl_gym.errors import ConfigError
from prorl_gym.runtimes.bubblewrap import BubblewrapRuntime
from prorl_gym.runtimes.factory import RuntimeFactory
from prorl_gym.testing import Reply, ScriptedLlm
from prorl_gym.toolserver.children import descendants


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are measured for less time."""
    monkeypatch.setattr(speed, "_RATE_S", 0.3)
    monkeypatch.setattr(speed, "_STARTS", 2)
    monkeypatch.setattr(speed, "_CALLS", 5)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch):
    """Make these checks and no other."""

    def choose(*names: str) -> None:
        for checks in (PAIR_CHECKS, LIMIT_CHECKS, SUBJECT_CHECKS):
            for name in set(checks) - set(names):
                monkeypatch.delitem(checks, name)

    return choose


def config(state: Path, **groups: object) -> ProrlConfig:
    return ProrlConfig(paths=PathsConfig(state=state, images=state / "images"), **groups)


async def examine(made: ProrlConfig) -> dict[str, Finding]:
    reported: list[Finding] = []
    findings = await Examination(made, reported.append, lambda _: None).run()
    assert reported == findings
    return {finding.name: finding for finding in findings}


async def skip_without(kind: str, state: Path) -> None:
    factory = RuntimeFactory(RuntimeConfig(), PathsConfig(state=state, images=state))
    try:
        await factory.prepare([kind])
    except ConfigError as error:
        pytest.skip(f"this host runs no {kind} sandboxes: {error}")
    finally:
        await factory.stop()


def assert_nothing_stays(state: Path) -> None:
    assert descendants(os.getpid()) == []
    assert list((state / "records").iterdir()) == list((state / "sandboxes").iterdir()) == []
    assert "PRORL_GYM_DOCTOR" not in os.environ


def assert_all_holds(found: dict[str, Finding]) -> None:
    assert {name: f.detail for name, f in found.items() if f.status == "failed"} == {}
    assert {*PAIR_CHECKS, *LIMIT_CHECKS, *SUBJECT_CHECKS, *host.HOST_CHECKS} <= set(found)
    for name in {*PAIR_CHECKS, *LIMIT_CHECKS, *SUBJECT_CHECKS} - {"disk limit", "processes limit", "host user"}:
        assert found[name].status == "ok", found[name]
    assert set(found["tool latency"].figures) == {"bash_ms", "ipython_ms", "file_editor_ms"}
    assert 0 < found["tool latency"].figures["bash_ms"] < 1000
    assert found["sandboxes per minute"].figures["per_minute"] > 1
    assert found["orphans after a kill"].figures["processes"] >= 6


async def test_bubblewrap_holds_what_it_promises(open_state: Path) -> None:
    await skip_without("bubblewrap", open_state)
    found = await examine(config(open_state))
    assert_all_holds(found)
    assert found["disk limit"].status == "note"
    assert "apptainer" in found["disk limit"].fix
    assert found["backends"].status == found["renderer"].status == "note"
    assert_nothing_stays(open_state)


@pytest.mark.apptainer
async def test_apptainer_holds_what_it_promises(open_state: Path) -> None:
    await skip_without("apptainer", open_state)
    found = await examine(config(open_state, runtime=RuntimeConfig(kind="apptainer")))
    assert_all_holds(found)
    assert_nothing_stays(open_state)


async def test_local_is_said_to_isolate_nothing_and_nothing_dangerous_is_tried(open_state: Path, only) -> None:
    only("network none", "other processes", "other files", "tool server", *LIMIT_CHECKS)
    found = await examine(config(open_state, runtime=RuntimeConfig(kind="local")))
    for name in ("network none", "other processes", "other files", "tool server", "limits"):
        assert found[name].status == "note"
        assert found[name].fix == "choose runtime=bubblewrap or runtime=apptainer"
    assert "the host's 127.0.0.1:" in found["network none"].detail
    assert "/sandboxes" in found["other files"].detail
    assert found["works"].status == "ok"
    assert not set(LIMIT_CHECKS) & set(found)
    planted = [word.strip() for word in found["other files"].detail.split(": ")[-1].split(",") if "doctor-" in word]
    assert planted
    assert not any(map(os.path.exists, planted))
    assert_nothing_stays(open_state)


async def test_a_sandbox_that_keeps_the_hosts_network_fails(open_state: Path, only, monkeypatch) -> None:
    await skip_without("bubblewrap", open_state)
    only("network none")
    monkeypatch.setattr(BubblewrapRuntime, "_shares_network", lambda self: True)
    found = (await examine(config(open_state)))["network none"]
    assert found.status == "failed"
    assert "the host's abstract sockets" in found.detail
    assert found.fix


async def test_a_limit_that_is_promised_and_not_held_fails(open_state: Path, only, monkeypatch) -> None:
    await skip_without("bubblewrap", open_state)
    only("disk limit")
    monkeypatch.setattr(BubblewrapRuntime, "_unenforced", lambda self: ())
    monkeypatch.setattr(limits, "_WRITTEN_BYTES", limits._DISK_BYTES + limits._FILE_BYTES)
    found = (await examine(config(open_state)))["disk limit"]
    assert (found.status, found.area) == ("failed", "bubblewrap")
    assert "not enforced, though promised: 40 MB were written with a limit of 32 MB" in found.detail
    assert found.fix


async def test_sandboxes_of_one_address_fail(open_state: Path, only, monkeypatch) -> None:
    only("addresses (network host)")
    monkeypatch.setattr(network, "_SHARERS", 2)
    monkeypatch.setattr("prorl_gym.runtimes.loopback.nth_address", lambda number: "127.0.0.1")
    monkeypatch.setattr("prorl_gym.runtimes.loopback.socket.socket.bind", lambda self, address: None)
    found = (await examine(config(open_state, runtime=RuntimeConfig(kind="local"))))["addresses (network host)"]
    assert found.status == "failed"
    assert "not unique: 127.0.0.1, 127.0.0.1" in found.detail


async def test_a_process_that_lives_on_fails_and_is_named(open_state: Path, only, monkeypatch) -> None:
    only("orphans after a kill")
    survivor = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    monkeypatch.setattr(orphans, "descendants", lambda pid: [survivor.pid, *descendants(pid)])
    monkeypatch.setattr(orphans, "_GONE_S", 0.5)
    try:
        found = (await examine(config(open_state, runtime=RuntimeConfig(kind="local"))))["orphans after a kill"]
    finally:
        await survivor.communicate(b"\n")
    assert found.status == "failed"
    assert f"live on: {survivor.pid}" in found.detail
    assert f"kill -9 {survivor.pid}" in found.fix


async def test_a_check_that_hangs_is_a_failure_of_its_own(open_state: Path, only, monkeypatch) -> None:
    only("output limit", "loopback inside")
    monkeypatch.setitem(PAIR_CHECKS, "loopback inside", lambda pair: asyncio.sleep(60))
    monkeypatch.setattr(examination, "_CHECK_S", 30.0)
    monkeypatch.setattr(Examination._check, "__defaults__", (0.5,))
    found = await examine(config(open_state, runtime=RuntimeConfig(kind="local")))
    assert found["loopback inside"].status == "failed"
    assert "not done within 0.5 s" in found["loopback inside"].detail
    assert found["renderer"].status == "note"
    assert_nothing_stays(open_state)


async def test_backend_and_renderer_are_proven(open_state: Path, only, scripted_model: str) -> None:
    only()
    async with ScriptedLlm(Reply(text="42"), model=scripted_model) as llm:
        backend = BackendConfig(addresses=(llm.address, "http://127.0.0.1:9"))
        found = await examine(config(open_state, runtime=RuntimeConfig(kind="local"), backend=backend))
    names = [name for name in found if name.startswith("backend ")]
    assert [found[name].status for name in names] == ["ok", "failed"]
    assert scripted_model in found[names[0]].detail
    assert "curl http://127.0.0.1:9" in found[names[1]].fix
    assert found["renderer"].status == "ok", found["renderer"]


async def test_a_model_that_cannot_be_rendered_and_a_host_too_small_fail(open_state: Path, only, monkeypatch) -> None:
    only()
    monkeypatch.setattr(host, "_NEEDED_BYTES", 1 << 60)
    monkeypatch.setattr(host, "_FILES_PER_JOB", 1 << 40)
    made = config(
        open_state,
        runtime=RuntimeConfig(kind="local", network="host"),
        policy=PolicyConfig(model=str(open_state / "none")),
    )
    found = await examine(made)
    for name in ("renderer", "disk space", "access"):
        assert found[name].status == "failed", found[name]
        assert found[name].fix
    assert "server.token_env" in found["access"].fix
