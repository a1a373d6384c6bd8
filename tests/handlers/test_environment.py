"""The generic handler through the pipeline: what is scored, what is masked, and that nothing stays open."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.config.models import ResourcesServerConfig
from prorl_gym.errors import ConfigError, RequestError
from prorl_gym.pipeline import Pipeline
from prorl_gym.runtimes.factory import RuntimeFactory
from prorl_gym.testing import Reply, ScriptedLlm
from prorl_gym.types import JobRequest, JobResult, SamplingParams, StageTimeouts
from tests.runtimes.base_image import base_image

from .kit import ask, call, config_of, environment, registry_of, serving

FALLING = """
from prorl_gym.rollout.agent import Agent
from prorl_gym.rollout.loop import run_loop
from prorl_gym.tokens.records import ChatMessage

class Falling(Agent):
    def first_messages(self, row, tools):
        return [ChatMessage("user", row["question"])]

    async def run(self, episode):
        await run_loop(episode, self.first_messages(episode.row, episode.tools))
        raise ZeroDivisionError("the scaffold has a bug")
"""


async def result_of(pipeline: Pipeline, request: JobRequest) -> JobResult:
    outcome = await pipeline.submit(request).wait(timeout_s=30)
    assert outcome is not None
    return JobResult.model_validate(outcome.result())


def journal_of(folder: Path) -> list[str]:
    path = folder / "journal"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def world(folder: Path, agent: dict[str, Any] | None = None, **fields: Any) -> Any:
    settings = {"resources": ResourcesServerConfig.model_validate({"journal": str(folder / "journal")}), **fields}
    return environment(agent, **settings)


@pytest.mark.parametrize("kind", ["local", "bubblewrap"])
async def test_a_job_from_seed_to_score(tmp_path: Path, kind: str) -> None:
    script = [
        Reply(text=call("press")),
        Reply(text=call("bash", command="cat data/input.txt > out.txt; cat setup.txt")),
        Reply(text="The end."),
    ]
    setup = {"sandbox": {"setup": ["echo prepared > setup.txt"]}}
    config = config_of(tmp_path, world(tmp_path, setup), runtime={"kind": kind})
    async with ScriptedLlm(script) as llm, serving(config, llm) as pipeline:
        result = await result_of(pipeline, ask(goal="fifteen", job_id="j1"))
        await until(lambda: "close" in journal_of(tmp_path))
    assert (result.status, result.stop_reason, result.error) == ("completed", "answered", None)
    assert (result.reward, result.resolved, result.mask_sample) == (1.0, True, False)
    detail = result.reward_components["detail"]
    assert detail["out"] == "fifteen"
    assert detail["answer"] == "The end."
    assert detail["roles"] == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    texts = [m.content for m in result.messages if m.role == "tool"]
    assert texts[0].startswith("pressed in j1-")
    assert texts[1].strip() == "prepared"
    assert [tool["function"]["name"] for tool in result.tools] == ["bash", "press"]
    assert result.artifacts == {"out.txt": "fifteen"}
    assert result.policy_versions.min == 3
    assert journal_of(tmp_path) == ["seed", "verify", "close"]
    provenance = result.provenance
    assert provenance["model"] == "scripted"
    assert provenance["sandbox"]["kind"] == kind
    assert provenance["sampling"]["max_tokens"] == 300
    assert len(provenance["tokenizer_digest"]) == 64


@pytest.mark.parametrize("kind", ["bubblewrap", pytest.param("apptainer", marks=pytest.mark.apptainer)])
async def test_setup_has_a_network_that_the_agent_has_not(tmp_path: Path, kind: str) -> None:
    """In Apptainer it is root too: what it puts into the image's folders is there for the agent."""
    look = "readlink /proc/self/ns/net"
    script = [Reply(text=call("bash", command=f"cat setup.txt; {look}; cat /usr/own")), Reply(text="The end.")]
    commands = [f"{look} > setup.txt", *(["echo installed > /usr/own"] if kind == "apptainer" else [])]
    sandbox = {"setup": commands, "setup_network": "host"}
    image = {"image": str(base_image() / "base.sif")} if kind == "apptainer" else {}
    config = config_of(tmp_path, world(tmp_path, {"sandbox": sandbox}), runtime={"kind": kind, **image})
    async with ScriptedLlm(script) as llm, serving(config, llm) as pipeline:
        result = await result_of(pipeline, ask())
    assert result.status == "completed", result.error
    at_setup, in_run, installed, *_ = next(m.content for m in result.messages if m.role == "tool").splitlines()
    assert at_setup == os.readlink("/proc/self/ns/net")
    assert in_run.startswith("net:[")
    assert in_run != at_setup
    assert ("installed" == installed) == (kind == "apptainer")


async def test_no_sandbox_and_the_real_math_environment(tmp_path: Path) -> None:
    served = environment(
        {"sandbox": None, "tools": ["submit"]},
        name="math_agent",
        resources_type="math",
        resources_name="math",
        resources=ResourcesServerConfig.model_validate({"workers": 1}),
    )
    script = [Reply(text=call("submit", answer=r"\boxed{42}"))]
    async with ScriptedLlm(script) as llm, serving(config_of(tmp_path, served), llm) as pipeline:
        row = {"question": "6*7?", "expected_answer": "42"}
        right = await result_of(pipeline, JobRequest(task="math", instance=row))
        wrong = await result_of(pipeline, JobRequest(task="math", instance={**row, "expected_answer": "43"}))
        with pytest.raises(RequestError, match="expected_answer"):
            pipeline.submit(JobRequest(task="math", instance={"question": "6*7?"}))
    assert (right.reward, right.stop_reason, right.finish) == (1.0, "submitted", True)
    assert (wrong.reward, wrong.resolved, wrong.mask_sample) == (0.0, False, False)


@pytest.mark.parametrize("command", ["mkdir out.txt", "mkfifo out.txt", "head -c 20M /dev/zero > out.txt"])
async def test_an_agent_cannot_dodge_its_score_with_a_file_that_nobody_can_read(tmp_path: Path, command: str) -> None:
    script = [Reply(text=call("bash", command=command)), Reply(text="ok")]
    async with ScriptedLlm(script) as llm, serving(config_of(tmp_path, world(tmp_path)), llm) as pipeline:
        result = await result_of(pipeline, ask())
    assert (result.status, result.reward, result.mask_sample) == ("completed", 0.0, False)
    assert any("out.txt" in warning for warning in result.warnings)


async def test_many_jobs_at_once_do_not_mix(tmp_path: Path) -> None:
    script = [Reply(text=call("bash", command="cat data/input.txt > out.txt; pwd")), Reply(text="ok")]
    async with ScriptedLlm(script) as llm, serving(config_of(tmp_path, world(tmp_path)), llm) as pipeline:
        tickets = [pipeline.submit(ask(goal=f"goal-{i}", question=f"Do {i}.")) for i in range(12)]
        outcomes = [await ticket.wait(timeout_s=60) for ticket in tickets]
        results = [JobResult.model_validate(outcome.result()) for outcome in outcomes if outcome]
        await until(lambda: journal_of(tmp_path).count("close") == 12)
    assert [r.reward for r in results] == [1.0] * 12
    assert [r.reward_components["detail"]["out"] for r in results] == [f"goal-{i}" for i in range(12)]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"question": ""}, "instance"),
        ({"question": ["x"]}, "instance.question"),
        ({"image": "ubuntu:24.04"}, "instance.image"),
        ({"docker_image": 7}, "instance.docker_image"),
    ],
)
async def test_a_row_that_cannot_run_is_refused_at_submit(tmp_path: Path, row: dict[str, Any], field: str) -> None:
    async with serving(config_of(tmp_path, world(tmp_path), images={"allow": ["good/*"]})) as pipeline:
        with pytest.raises(RequestError) as refused:
            pipeline.submit(ask(**row))
        assert refused.value.field == field
        with pytest.raises(RequestError, match="goal"):
            pipeline.submit(JobRequest(task="world", instance={"question": "x"}))
    assert journal_of(tmp_path) == []


async def test_a_row_may_only_list_tools_that_the_task_has(tmp_path: Path) -> None:
    served = world(tmp_path, resources_type=None, resources_name=None, resources=None)
    async with serving(config_of(tmp_path, served)) as pipeline:
        tools = [{"type": "function", "name": "bash"}, {"type": "function", "name": "teleport"}]
        with pytest.raises(RequestError, match=r"teleport.*bash") as refused:
            pipeline.submit(ask(responses_create_params={"input": "Go.", "tools": tools}))
    assert refused.value.field == "instance.responses_create_params.tools[1]"


async def test_a_failed_setup_is_the_infrastructures(tmp_path: Path) -> None:
    setup = {"sandbox": {"setup": ["echo something is missing; (exit 3)"]}}
    async with ScriptedLlm(Reply()) as llm, serving(config_of(tmp_path, world(tmp_path, setup)), llm) as pipeline:
        result = await result_of(pipeline, ask())
        await until(lambda: "close" in journal_of(tmp_path))
    assert (result.status, result.critical_error, result.reward, result.mask_sample) == ("failed", "init", None, True)
    assert result.failure.kind == "runtime_start"
    assert "something is missing" in result.failure.message
    assert llm.requests == []
    assert journal_of(tmp_path) == ["seed", "close"]


async def test_a_session_that_could_not_be_seeded_is_closed_all_the_same(tmp_path: Path) -> None:
    async with ScriptedLlm(Reply()) as llm, serving(config_of(tmp_path, world(tmp_path)), llm) as pipeline:
        result = await result_of(pipeline, ask(seed_raises=True))
        await until(lambda: "close" in journal_of(tmp_path))
    assert (result.status, result.critical_error, result.mask_sample) == ("failed", "init", True)


async def test_a_dead_policy_is_no_measurement_and_is_not_graded(tmp_path: Path) -> None:
    script = [Reply(text=call("bash", command="echo g > out.txt")), Reply(fault="short_ids", text="x")]
    async with ScriptedLlm(script) as llm, serving(config_of(tmp_path, world(tmp_path)), llm) as pipeline:
        result = await result_of(pipeline, ask())
        await until(lambda: "close" in journal_of(tmp_path))
    assert (result.status, result.critical_error, result.reward, result.mask_sample) == ("failed", "run", None, True)
    assert result.failure.kind == "backend"
    assert len(result.segments) == 1
    assert journal_of(tmp_path) == ["seed", "close"]


async def test_an_agent_that_raises_is_scored_on_what_it_did(tmp_path: Path) -> None:
    config = config_of(tmp_path, world(tmp_path, agent_type="falling"))
    folder = tmp_path / "root" / "agents" / "falling"
    folder.mkdir(parents=True)
    (folder / "app.py").write_text(FALLING)
    script = [Reply(text=call("bash", command="echo g > out.txt")), Reply(text="ok")]
    async with ScriptedLlm(script) as llm, serving(config, llm) as pipeline:
        result = await result_of(pipeline, ask())
    assert (result.status, result.stop_reason, result.critical_error) == ("failed", "error", "run")
    assert (result.reward, result.mask_sample) == (1.0, False)
    assert "the scaffold has a bug" in result.error


@pytest.mark.parametrize(
    ("mode", "kind", "says"),
    [
        ("raise", "evaluation", "the grader has a bug"),
        ("nan", "evaluation", "finite"),
        ("mask", "judge_failed", "the judge is asleep"),
    ],
)
async def test_a_broken_grader_is_never_a_reward(tmp_path: Path, mode: str, kind: str, says: str) -> None:
    async with ScriptedLlm(Reply(text="g")) as llm, serving(config_of(tmp_path, world(tmp_path)), llm) as pipeline:
        result = await result_of(pipeline, ask(verify=mode))
        await until(lambda: "close" in journal_of(tmp_path))
    assert result.mask_sample is True
    assert result.reward in (None, 0.0)
    assert (result.failure.stage, result.failure.kind) == ("eval", kind)
    assert says in result.failure.message


@pytest.mark.parametrize(("rule", "reward"), [("skip", None), ("evaluate", 1.0)])
async def test_an_episode_out_of_time_is_scored_only_on_demand(tmp_path: Path, rule: str, reward: float | None) -> None:
    script = [Reply(text=call("bash", command="cat data/input.txt > out.txt; sleep 60"))]
    config = config_of(tmp_path, world(tmp_path), pipeline={"on_run_timeout": rule})
    request = ask().model_copy(update={"stage_timeouts_s": StageTimeouts(run=1.0)})
    async with ScriptedLlm(script) as llm, serving(config, llm) as pipeline:
        result = await result_of(pipeline, request)
    assert (result.status, result.stop_reason) == ("timeout", "timeout")
    assert (result.reward, result.mask_sample) == (reward, reward is None)
    assert len(result.segments) == 1


async def test_without_a_resources_server_there_is_a_trajectory_and_no_reward(tmp_path: Path) -> None:
    served = world(tmp_path, resources_type=None, resources_name=None, resources=None)
    async with ScriptedLlm(Reply(text="hi")) as llm, serving(config_of(tmp_path, served), llm) as pipeline:
        result = await result_of(pipeline, ask())
    assert (result.status, result.reward, result.mask_sample) == ("completed", None, True)
    assert result.segments[0].num_turns == 1


@pytest.mark.parametrize("where", ["model", "bash", "verify", "eval queue"])
async def test_cancel_anywhere_closes_the_session_and_asks_for_nothing_more(tmp_path: Path, where: str) -> None:
    go = tmp_path / "go"
    script = {
        "model": [Reply(hold=True)],
        "bash": [Reply(text=call("bash", command="sleep 60")), Reply(text="never")],
    }.get(where, [Reply(text="g")])
    held = {"verify": "hold", "go": str(go)} if where in ("verify", "eval queue") else {}
    pools = {"eval": {"workers": 1}}
    config = config_of(tmp_path, world(tmp_path), pipeline=pools)
    async with ScriptedLlm(script) as llm, serving(config, llm) as pipeline:
        ticket = pipeline.submit(ask(job_id="first", **held))
        if where == "model":
            await llm.until(lambda server: server.in_flight == 1)
        elif where == "bash":
            await until(lambda: any(m["role"] == "assistant" for m in ticket.partial_messages()))
        else:
            await until(lambda: "verify" in journal_of(tmp_path))
        if where == "eval queue":
            ticket = pipeline.submit(ask(job_id="second", question="Second."))
            await until(lambda: pipeline.snapshot().eval_queue == 1)
        asked = len(llm.requests)
        pipeline.cancel(job_ids=[ticket.id])
        outcome = await ticket.wait(timeout_s=2)
        assert outcome is not None and outcome.status == "cancelled"
        await until(lambda: journal_of(tmp_path).count("close") == 1)
        go.touch()
        assert len(llm.requests) == asked
    assert journal_of(tmp_path).count("close") == journal_of(tmp_path).count("seed")


@pytest.mark.parametrize(
    ("agent", "fields", "says"),
    [
        ({"tools": ["bash", "teleport"]}, {}, "teleport.*bash, ipython, file_editor, web_search, web_fetch, submit"),
        ({"tools": ["bash"], "sandbox": None}, {}, "bash needs a sandbox"),
        ({}, {"agent_type": "no_such_agent"}, r"no_such_agent/app\.py"),
        ({}, {"resources_type": "no_such_world"}, r"no_such_world/app\.py"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_at_start(
    tmp_path: Path, agent: dict[str, Any], fields: dict[str, Any], says: str
) -> None:
    config = config_of(tmp_path, world(tmp_path, agent, **fields))
    with pytest.raises(ConfigError, match=says):
        registry_of(config, lambda name: None, RuntimeFactory(config.runtime, config.paths))


def test_sampling_params_stay_what_was_asked() -> None:
    assert ask().sampling_params == SamplingParams(max_tokens=300)
