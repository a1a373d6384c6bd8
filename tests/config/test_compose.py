"""What a user types, and what comes of it."""

import logging
from pathlib import Path

import pytest

from prorl_gym.commands.serve import log_origin
from prorl_gym.config.compose import compose, load_config
from prorl_gym.errors import ConfigError


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(overrides)
    return str(refused.value)


def test_without_overrides_math_is_served_on_loopback() -> None:
    config = load_config()
    assert [environment.name for environment in config.environments] == ["math_agent"]
    assert config.environments[0].resources_type == "math"
    assert (config.server.host, config.server.port, config.runtime.kind) == ("127.0.0.1", 8006, "bubblewrap")
    assert config.task_aliases["deepscaler"] == "math_agent"


def test_values_and_options_are_set() -> None:
    config = load_config(["runtime=local", "pipeline.run.workers=256", "server.port=0", "policy.sampling.top_p=0.9"])
    assert config.runtime.kind == "local"
    assert (config.pipeline.run.workers, config.server.port, config.policy.sampling.top_p) == (256, 0, 0.9)
    assert load_config(["runtime={workdir: /w}"]).runtime.workdir == "/w"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pipeline.run.wokers=3", "pipeline.run.wokers: unknown key; did you mean pipeline.run.workers?"),
        ("serve.port=3", "serve: unknown key; did you mean server?"),
        ("model=x", "model: unknown key; did you mean policy.model?"),
        ("pipeline.run.workers=many", "pipeline.run.workers: should be a valid integer"),
        ("server.host=null", "server.host: should be a valid string, not null"),
        ("runtime.kind=docker", "runtime.kind: should be 'local', 'bubblewrap' or 'apptainer', not 'docker'"),
        ("backend.addresses=http://h:1", """write a list: 'backend.addresses=["http://h:1"]'"""),
        ("roots=[a]", "roots: made from gym and the search roots"),
        ("runtime=docker", "runtime: no option 'docker'; known: apptainer, bubblewrap, local"),
        ("runtime=aptainer", "did you mean apptainer?"),
        ("environment=[maths]", "environment: no option 'maths'; did you mean math?"),
        ("environment=null", "for none write 'environment=[]'"),
        ("~gym.math_agen", "there is no 'math_agen'; did you mean math_agent?"),
        ("gym.mth_agent.responses_api_agents.tool_calling.max_turns=3", "did you mean math_agent?"),
        (
            "gym.math_agent.responses_api_agents.tool_calling.max_trns=3",
            "gym.math_agent.responses_api_agents.tool_calling.max_trns: unknown key; did you mean "
            "gym.math_agent.responses_api_agents.tool_calling.max_turns?",
        ),
        ('handlers={math: "a:B"}', "handlers.math: an agent below gym has that name already"),
        ("task_aliases={math: other}", "task_aliases.math: an agent below gym has that name already"),
    ],
)
def test_a_mistake_is_named_with_its_key(override: str, message: str) -> None:
    assert message in refusal(override)


def test_each_mistake_has_a_line_and_none_is_said_twice() -> None:
    lines = refusal("pipeline.run.wokers=3", "server.port=-1").splitlines()
    assert len(lines) == 2
    assert any(line.startswith("server.port: ") for line in lines)


def test_a_group_chosen_twice_is_refused_instead_of_dropped() -> None:
    message = refusal("environment=[math]", "+environment=math")
    assert "environment: chosen 2 times (environment=[math] +environment=math)" in message
    assert "write 'environment=[math]'" in message
    assert refusal("runtime=local", "runtime=bubblewrap").endswith("keep one of them")


def test_gym_values_are_set_and_deleted() -> None:
    (agent,) = load_config(["gym.math_agent.responses_api_agents.tool_calling.max_turns=3"]).environments
    assert agent.agent.max_turns == 3
    assert load_config(["~gym.math_agent"]).environments == ()
    assert load_config(["environment=[]"]).environments == ()


def test_an_agent_is_added_on_the_command_line() -> None:
    config = load_config(
        [
            "+gym.quick_agent={responses_api_agents: {tool_calling: {tools: [bash], "
            "resources_server: {type: resources_servers, name: math}}}}"
        ]
    )
    assert [environment.name for environment in config.environments] == ["math_agent", "quick_agent"]


def test_an_experiment_lies_over_the_groups_and_under_the_command_line() -> None:
    demo, plain = load_config(["experiment=demo"]).policy.sampling, load_config().policy.sampling
    assert demo.max_tokens < plain.max_tokens
    own = load_config(["experiment=demo", "policy.sampling.max_tokens=99"]).policy.sampling
    assert (own.max_tokens, own.temperature) == (99, demo.temperature)


def test_secrets_are_never_in_the_logged_configuration(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "sk-very-secret")
    gym = tmp_path / "gym.yaml"
    model = "{base_url: 'http://e:8000/v1', api_key: '${policy_api_key}'}"
    gym.write_text(
        "policy_api_key: ${oc.env:ENGINE_KEY}\n"
        f"policy_model: {{responses_api_models: {{vllm_model: {model}}}}}\n"
        "ask_agent: {responses_api_agents: {simple_agent: {model_server: {type: responses_api_models, "
        "name: policy_model}}}}\n"
    )
    composition = compose([f"gym.config_paths=['{gym}']"])
    assert composition.config.backend.addresses == ("http://e:8000/v1",)
    assert composition.config.backend.api_key_env == "ENGINE_KEY"
    with caplog.at_level(logging.INFO):
        log_origin(composition)
    assert "http://e:8000/v1" in caplog.text
    assert "composed environment/math from" in caplog.text
    assert "very-secret" not in caplog.text
