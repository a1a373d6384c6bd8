"""The default scaffold: which conversation a row starts."""

from pathlib import Path
from typing import Any

import pytest

from prorl_gym.config.models import AgentConfig
from prorl_gym.errors import ConfigError, RequestError
from prorl_gym.rollout.agent import Agent, AgentContext
from prorl_gym.rollout.loading import load_class
from prorl_gym.tools.spec import ToolSpec
from prorl_gym.tools.submit import SUBMIT

ROOT = Path(__file__).parents[2]
BASH = ToolSpec("bash", "Run.", {"type": "object", "properties": {}})


def agent(**prompt: Any) -> Agent:
    agent_class, folder = load_class([ROOT], "agents", "tool_calling", "app.py", Agent)
    return agent_class(AgentContext("t_agent", AgentConfig(prompt=prompt), folder))


def conversation(row: dict[str, Any], tools: tuple[ToolSpec, ...] = (), **prompt: Any) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in agent(**prompt).first_messages(row, tools)]


@pytest.mark.parametrize("column", ["question", "problem", "problem_statement"])
def test_a_question_stands_below_our_system_message(column: str) -> None:
    [system, user] = conversation({column: "What is 2+2?"}, (BASH,))
    assert system[0] == "system" and "bash" in system[1]
    assert user == ("user", "What is 2+2?")


def test_texts_come_from_configuration() -> None:
    [system, user] = conversation({"question": "2+2?"}, system="Be brief.", instruction=r"Answer in \boxed{}.")
    assert system == ("system", "Be brief.")
    assert user == ("user", "2+2?\n\nAnswer in \\boxed{}.")
    assert conversation({"question": "2+2?"}, system="") == [("user", "2+2?")]


def test_the_agent_is_told_how_to_end() -> None:
    assert "call `submit`" in conversation({"question": "x"}, (BASH, SUBMIT))[0][1]
    assert "without a tool call" in conversation({"question": "x"}, (BASH,))[0][1]


def test_row_text_is_never_a_template() -> None:
    hostile = "{{ 7 * 7 }} {% for x in y %} {{ row.__class__ }} {# gone #}"
    assert conversation({"question": hostile})[-1] == ("user", hostile)


def test_messages_of_the_row_come_first() -> None:
    row = {
        "responses_create_params": {
            "input": [
                {"role": "developer", "content": "Rules."},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A"}, {"text": "B"}]},
            ]
        },
        "prompt": [{"role": "user", "content": "not this"}],
        "question": "nor this",
    }
    assert conversation(row, instruction="nor that") == [("system", "Rules."), ("user", "AB")]
    del row["responses_create_params"]
    assert conversation(row, system="S") == [("system", "S"), ("user", "not this")]
    assert conversation({"responses_create_params": {"input": []}, "question": "q"}, system="") == [("user", "q")]
    assert conversation({"responses_create_params": {"input": "q", "instructions": "I"}}) == [
        ("system", "I"),
        ("user", "q"),
    ]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({}, "instance"),
        ({"question": ""}, "instance"),
        ({"question": 5}, "instance.question"),
        ({"prompt": 5}, "instance.prompt"),
        ({"prompt": [5]}, "instance.prompt[0]"),
        ({"prompt": [{"role": "robot", "content": "x"}]}, "instance.prompt[0].role"),
        ({"prompt": [{"role": "user", "content": None}]}, "instance.prompt[0].content"),
        ({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}, "instance.prompt[0].content[0]"),
        ({"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "instance.prompt[1]"),
        (
            {"responses_create_params": {"input": [{"type": "function_call", "name": "f"}]}},
            "instance.responses_create_params.input[0]",
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_by_field(row: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        conversation(row)
    assert refused.value.field == field


def test_a_template_that_does_not_render_is_a_config_error(tmp_path: Path) -> None:
    agent_class, _ = load_class([ROOT], "agents", "tool_calling", "app.py", Agent)
    (tmp_path / "prompt.jinja2").write_text("{{ no_such_value }}")
    with pytest.raises(ConfigError, match="no_such_value"):
        agent_class(AgentContext("t_agent", AgentConfig(), tmp_path))
