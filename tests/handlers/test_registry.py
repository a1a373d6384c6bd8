"""Which handler serves which task, and what happens when that is not clear."""

import sys
import textwrap
from pathlib import Path
from typing import ClassVar

import pytest

from prorl_gym.config.models import PathsConfig, ProrlConfig
from prorl_gym.errors import ConfigError, UnknownTask
from prorl_gym.handlers.base import AgentHandler, EvalOutput, HandlerContext, Job, Prepared, RunOutput
from prorl_gym.handlers.registry import HandlerRegistry
from prorl_gym.pipeline import Pipeline
from prorl_gym.types import JobRequest, JobStatus, StopReason

HERE = __name__


class Echo(AgentHandler):
    log: ClassVar[list[str]] = []

    async def start(self) -> None:
        self.log.append(f"start {self.context.task}")

    async def stop(self) -> None:
        self.log.append(f"stop {self.context.task}")

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        return RunOutput(StopReason.ANSWERED, answer=str(job.request.instance.get("question", "")))

    async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
        return EvalOutput(1.0)


class Failing(Echo):
    async def start(self) -> None:
        raise RuntimeError("no licence")


class FailingToStop(Echo):
    async def stop(self) -> None:
        raise RuntimeError("still busy")


class Unmakable(Echo):
    def __init__(self, context: HandlerContext) -> None:
        raise KeyError("model")


NOT_A_HANDLER = object()


@pytest.fixture(autouse=True)
def fresh_log():
    Echo.log.clear()


def registry_of(**config: object) -> HandlerRegistry:
    full = ProrlConfig.model_validate({"paths": {"state": "state", "images": "images"}, **config})
    return HandlerRegistry(full, lambda task: HandlerContext(task, full, lambda name: None, lambda spec: None))


def named(registry: HandlerRegistry, *, task: str | None = None, **row: object) -> str:
    return registry.resolve(JobRequest(task=task, instance=row))[0]


def test_a_task_is_found_by_its_name_the_rows_agent_or_its_data_source():
    registry = registry_of(
        handlers={"math_agent": f"{HERE}:Echo", "code": f"{HERE}:Echo"},
        task_aliases={"deepscaler": "math_agent", "taco": "code"},
    )
    assert named(registry, task="math_agent") == "math_agent"
    assert named(registry, task="math") == "math_agent"
    assert named(registry, task="code", agent_ref={"name": "math"}, data_source="deepscaler") == "code"
    assert named(registry, agent_ref={"type": "responses_api_agents", "name": "math_agent"}) == "math_agent"
    assert named(registry, agent_ref={"name": "code"}, data_source="deepscaler") == "code"
    assert named(registry, data_source="deepscaler") == "math_agent"
    assert named(registry, data_source="taco", agent_ref="garbage") == "code"
    assert named(registry, data_source="math") == "math_agent"
    assert registry.names() == ["code", "math_agent"]
    task, handler = registry.resolve(JobRequest(task="math", instance={}))
    assert isinstance(handler, Echo) and handler.context.task == task


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"task": "nothing", "instance": {}}, "task"),
        ({"instance": {"agent_ref": {"name": "nothing"}}}, "instance.agent_ref.name"),
        ({"instance": {"data_source": "nothing"}}, "instance.data_source"),
        ({"instance": {"data_source": 7}}, "task"),
        ({"instance": {}}, "task"),
    ],
)
def test_an_unknown_task_names_the_field_and_lists_the_known_ones(request_fields, field):
    registry = registry_of(handlers={"b": f"{HERE}:Echo", "a": f"{HERE}:Echo"})
    with pytest.raises(UnknownTask, match="known: a, b") as unknown:
        registry.resolve(JobRequest.model_validate(request_fields))
    assert unknown.value.field == field


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_colon", "not of the form"),
        ("no.such.module:Class", "ModuleNotFoundError"),
        (f"{HERE}:Missing", "AttributeError"),
        (f"{HERE}:NOT_A_HANDLER", "no AgentHandler class"),
        (f"{HERE}:Unmakable", "cannot be made"),
    ],
)
def test_a_class_that_cannot_be_loaded_is_a_config_error_that_names_its_key(path, says):
    with pytest.raises(ConfigError, match=says) as wrong:
        registry_of(handlers={"t": path})
    assert "handlers.t" in str(wrong.value)


def test_two_tasks_that_claim_one_name_are_a_config_error():
    with pytest.raises(ConfigError, match="clashes with 'math_agent'"):
        registry_of(handlers={"math": f"{HERE}:Echo", "math_agent": f"{HERE}:Echo"})
    with pytest.raises(ConfigError, match="a task of that name itself"):
        registry_of(handlers={"math": f"{HERE}:Echo", "code": f"{HERE}:Echo"}, task_aliases={"math": "code"})


async def test_handlers_start_in_order_and_stop_in_reverse_once():
    registry = registry_of(handlers={"a": f"{HERE}:Echo", "b": f"{HERE}:Echo"})
    await registry.start()
    await registry.start()
    await registry.stop()
    await registry.stop()
    assert Echo.log == ["start a", "start b", "stop b", "stop a"]


async def test_a_failing_start_names_its_task_and_stops_the_others():
    registry = registry_of(handlers={"a": f"{HERE}:Echo", "b": f"{HERE}:Failing"})
    with pytest.raises(ConfigError, match="task 'b' did not start: no licence"):
        await registry.start()
    assert Echo.log == ["start a", "stop a"]


async def test_a_failing_stop_does_not_keep_the_others_from_stopping(caplog):
    registry = registry_of(handlers={"a": f"{HERE}:Echo", "b": f"{HERE}:FailingToStop"})
    await registry.start()
    await registry.stop()
    assert Echo.log[-1] == "stop a"
    assert "task 'b' did not stop cleanly" in caplog.text


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package of somebody else, with an entry point."""
    module = tmp_path / "somebodys_rollouts.py"
    module.write_text(
        textwrap.dedent(
            '''
            """A task family of our own."""
            from prorl_gym.handlers.base import AgentHandler, EvalOutput, RunOutput
            from prorl_gym.types import StopReason

            class Reverse(AgentHandler):
                def run(self, job, prepared):
                    return RunOutput(StopReason.ANSWERED, answer=job.request.instance["question"][::-1])

                def eval(self, job, run_output):
                    right = run_output.answer == job.request.instance["expected_answer"]
                    return EvalOutput(float(right), resolved=right)
            '''
        )
    )
    info = tmp_path / "somebodys_rollouts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-rollouts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[prorl_gym.handlers]\nreverse = somebodys_rollouts:Reverse\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield info
    sys.modules.pop("somebodys_rollouts", None)


async def test_a_handler_from_an_installed_package_serves_its_task_unasked(third_party):
    config = ProrlConfig(paths=PathsConfig(state=Path("state"), images=Path("images")))
    registry = HandlerRegistry(
        config,
        lambda task: HandlerContext(task, config, lambda name: None, lambda spec: None),  # type: ignore[arg-type,return-value]
    )
    assert registry.names() == ["reverse"]
    pipeline = Pipeline(config, registry)
    await registry.start()
    await pipeline.start()
    row = {"data_source": "reverse", "question": "abc", "expected_answer": "cba"}
    outcome = await pipeline.submit(JobRequest(instance=row)).wait(10)
    assert (outcome.status, outcome.score.reward) == (JobStatus.COMPLETED, 1.0)
    await pipeline.stop()
    await registry.stop()


def test_an_entry_point_that_clashes_or_does_not_load_names_its_package(third_party):
    with pytest.raises(ConfigError, match=r"somebodys-rollouts.*'reverse' is there already"):
        registry_of(handlers={"reverse": f"{HERE}:Echo"})
    assert registry_of(handlers={"reverse": "somebodys_rollouts:Reverse"}).names() == ["reverse"]
    (third_party / "entry_points.txt").write_text("[prorl_gym.handlers]\nreverse = somebodys_rollouts:Missing\n")
    with pytest.raises(ConfigError, match=r"somebodys-rollouts.*AttributeError"):
        registry_of()
