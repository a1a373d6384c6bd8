"""A NeMo Gym YAML as it stands there, read here, and ours written out."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from prorl_gym.cli import main
from prorl_gym.config.compose import Composition, compose
from prorl_gym.errors import ConfigError

GYM = """\
policy_base_url: http://engine:8000/v1
policy_api_key: dummy
policy_model_name: some/model
mine:
  resources_servers:
    mine: {entrypoint: app.py, domain: math, verified: false, judge: {type: responses_api_models, name: policy_model}}
mine_simple_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: mine}
      model_server: {type: responses_api_models, name: policy_model}
      max_steps: 5
      num_workers: 2
      datasets:
      - {name: example, type: example, jsonl_fpath: resources_servers/mine/data/example.jsonl, license: MIT}
policy_model:
  responses_api_models:
    vllm_model:
      entrypoint: app.py
      base_url: ${policy_base_url}
      api_key: ${policy_api_key}
      model: ${policy_model_name}
mine_environment_server:
  environment_servers:
    legacy_agent: {entrypoint: app.py, agent_server: {type: responses_api_agents, name: mine_simple_agent}}
"""


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def composed(path: str | Path, *overrides: str) -> Composition:
    return compose(["environment=[]", f"gym.config_paths=['{path}']", *overrides])


def names(composition: Composition) -> list[str]:
    return [environment.name for environment in composition.config.environments]


def test_a_gym_yaml_is_served_as_it_stands(user_root: Path) -> None:
    write(user_root, "configs/mine.yaml", GYM)
    composition = composed("configs/mine.yaml")  # relative to a root
    (environment,) = composition.config.environments
    assert environment.name == "mine_simple_agent"
    assert environment.agent_type == "tool_calling"
    assert (environment.resources_type, environment.resources_name) == ("mine", "mine")
    assert environment.agent.sandbox is None
    assert environment.agent.max_steps == 5
    assert environment.resources is not None
    assert environment.resources.own_fields["judge"] == {"type": "responses_api_models", "name": "policy_model"}
    assert composition.config.backend.addresses == ("http://engine:8000/v1",)
    assert any("mine_environment_server" in warning for warning in composition.warnings)
    assert any("num_workers" in warning for warning in composition.warnings)


def test_a_gym_yaml_is_pasted_under_gym(user_root: Path) -> None:
    write(user_root, "conf/environment/pasted.yaml", f"# @package gym\n{GYM}")
    composition = compose(["environment=[pasted]"])
    assert names(composition) == ["mine_simple_agent"]
    assert composition.config.backend.addresses == ("http://engine:8000/v1",)


def test_interpolations_see_gym_as_their_root(user_root: Path) -> None:
    path = write(user_root, "mine.yaml", GYM)
    assert composed(path, 'gym.policy_base_url=["http://a:1","http://b:1"]').config.backend.addresses == (
        "http://a:1",
        "http://b:1",
    )
    with pytest.raises(ConfigError, match=r"gym\.policy_model.*policy_base_url"):
        composed(path, "~gym.policy_base_url")


INHERITING = """\
config_paths: [mine.yaml]
mine_hard:
  _inherit_from: mine
mine_hard_simple_agent:
  _inherit_from: mine_simple_agent
  responses_api_agents:
    simple_agent:
      _delete_key: max_steps, num_workers
      resources_server: {name: mine_hard}
      max_turns: 3
other_agent:
  _copy: mine_hard_simple_agent
"""


def test_inherit_moves_copy_keeps_and_delete_deletes(user_root: Path) -> None:
    write(user_root, "mine.yaml", GYM)
    write(user_root, "hard.yaml", INHERITING)
    composition = composed("hard.yaml")
    assert names(composition) == ["mine_hard_simple_agent", "other_agent"]
    hard, other = composition.config.environments
    assert (hard.resources_name, hard.agent.max_turns, hard.agent.max_steps) == ("mine_hard", 3, None)
    assert other.agent == hard.agent
    assert "mine" not in composition.gym
    assert "mine_simple_agent" not in composition.gym
    assert hard.agent.datasets[0]["license"] == "MIT"


def test_a_value_is_copied_and_a_command_line_value_is_inherited(user_root: Path) -> None:
    write(user_root, "mine.yaml", GYM)
    write(user_root, "hard.yaml", INHERITING + "policy_model_name: ${copy:policy_base_url}\n")
    override = "gym.mine_simple_agent.responses_api_agents.simple_agent.description=told"
    composition = composed("hard.yaml", override)
    assert composition.gym["policy_model_name"] == "http://engine:8000/v1"
    assert {environment.agent.description for environment in composition.config.environments} == {"told"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {_inherit_from: mne}\nmine: {resources_servers: {mine: {}}}\n", "did you mean mine"),
        ("a: {_copy: b}\nb: {_copy: a}\n", "inherits from itself"),
        ("a: {_copy: mine, _delete_key: nope}\nmine: {resources_servers: {mine: {}}}\n", "there is no 'nope'"),
        ("config_paths: [self.yaml]\n", "lists itself"),
        ("config_paths: [gone.yaml]\n", "no file 'gone.yaml'"),
        ("config_paths: gone.yaml\n", "a list of paths"),
        ("- a\n", "a mapping is expected"),
        ("a: {resource_servers: {mine: {}}}\n", "did you mean resources_servers?"),
        ("a: {resources_servers: {mine: {}, other: {}}}\n", "exactly one implementation"),
        ("a: {resources_servers: {mine: {}}, responses_api_agents: {}}\n", "one server type per instance"),
        ("a: {responses_api_agents: {openhands: {}}}\n", "agents/openhands is in no search root"),
        (
            "a: {responses_api_agents: {tool_calling: {resources_server: {type: resources_servers, name: mine}}}}\n",
            "no resources_servers instance named 'mine'",
        ),
        ("a_agent: {responses_api_agents: {tool_calling: {}}}\na: {responses_api_agents: {tool_calling: {}}}\n", "'a'"),
        ("a: {responses_api_agents: {tool_calling: {tools: '???'}}}\n", "gym.a"),
        ("a: {responses_api_agents: {tool_calling: {sandbox: {imge: x}}}}\n", "tool_calling.sandbox.image?"),
    ],
)
def test_a_wrong_tree_is_refused_with_its_key(user_root: Path, text: str, message: str) -> None:
    write(user_root, "self.yaml", text)
    with pytest.raises(ConfigError) as refused:
        composed("self.yaml")
    assert message in str(refused.value)


def test_gym_config_can_be_read_back(user_root: Path) -> None:
    write(user_root, "mine.yaml", GYM)
    write(user_root, "hard.yaml", INHERITING)
    arguments = ["environment=[math]", "gym.config_paths=[hard.yaml]"]
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(["gym-config", *arguments]) == 0
    tree: dict[str, Any] = yaml.safe_load(printed.getvalue())
    assert set(tree) >= {"math", "math_agent", "mine_hard", "mine_hard_simple_agent", "policy_model"}
    assert tree["policy_model"]["responses_api_models"]["vllm_model"]["base_url"] == "${policy_base_url}"
    again = write(user_root, "printed.yaml", printed.getvalue())
    first, second = compose(arguments).config, composed(again).config
    assert sorted(second.environments, key=lambda e: e.name) == sorted(first.environments, key=lambda e: e.name)
    assert second.backend.addresses == first.backend.addresses
