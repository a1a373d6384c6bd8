"""What the model is told, and what it hears when it sends something that cannot run."""

import json

import pytest

from prorl_gym.tools.sandbox import BASH, FILE_EDITOR, IPYTHON, SANDBOX_TOOLS, check_arguments
from prorl_gym.tools.spec import ToolSpec


@pytest.mark.parametrize(
    ("spec", "arguments"),
    [
        (BASH, {"command": "echo hi"}),
        (BASH, {"command": "", "timeout_s": 5}),
        (BASH, {"command": "echo 🚀", "timeout_s": 0.5}),
        (IPYTHON, {"code": "1\n2", "timeout_s": None}),
        (FILE_EDITOR, {"command": "view", "path": "a", "view_range": [1, -1]}),
        (FILE_EDITOR, {"command": "create", "path": "a", "file_text": ""}),
        (FILE_EDITOR, {"command": "str_replace", "path": "a", "old_str": "x"}),
        (FILE_EDITOR, {"command": "insert", "path": "a", "insert_line": 0, "new_str": "x"}),
        (FILE_EDITOR, {"command": "undo_edit", "path": "a"}),
    ],
)
def test_right_arguments_pass(spec, arguments):
    assert check_arguments(spec, arguments) is None


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        (BASH, {}, "'command' of bash is missing. Its arguments are: command, timeout_s"),
        (BASH, {"command": None}, "'command' of bash is missing"),
        (BASH, {"cmd": "ls", "command": "ls"}, "bash has no argument 'cmd'. Its arguments are: command, timeout_s"),
        (BASH, {"command": 5}, "'command' of bash must be a string, not an integer"),
        (BASH, {"command": ["ls"]}, "must be a string, not an array"),
        (BASH, {"command": "ls", "timeout_s": True}, "must be a number, not a boolean"),
        (BASH, {"command": "ls", "timeout_s": 0}, "must be greater than 0"),
        (BASH, {"command": "ls", "timeout_s": float("nan")}, "must be greater than 0"),
        (BASH, {"command": "a\0b"}, "NUL character"),
        (IPYTHON, {"code": "x = '\ud83d'"}, "half a character, '\\ud83d', at position 5"),
        (IPYTHON, {"code": "x" * (17 << 20)}, "bytes, more than"),
        (IPYTHON, "print(1)", "must be a JSON object, not a string"),
        (IPYTHON, None, "must be a JSON object, not null"),
        (
            FILE_EDITOR,
            {"command": "delete", "path": "a"},
            "must be one of view, create, str_replace, insert, undo_edit",
        ),
        (FILE_EDITOR, {"command": "create", "path": "a"}, "'file_text' of file_editor is missing"),
        (FILE_EDITOR, {"command": "insert", "path": "a", "insert_line": 1}, "'new_str' of file_editor is missing"),
        (
            FILE_EDITOR,
            {"command": "insert", "path": "a", "insert_line": 1.5, "new_str": ""},
            "an integer, not a number",
        ),
        (FILE_EDITOR, {"command": "view", "path": "a", "view_range": [1]}, "must have 2 items, not 1"),
        (
            FILE_EDITOR,
            {"command": "view", "path": "a", "view_range": [1, "2"]},
            "holds an item that must be an integer",
        ),
    ],
)
def test_wrong_arguments_are_answered_in_words(spec, arguments, message):
    assert message in check_arguments(spec, arguments)


def test_other_tools_are_checked_by_their_own_schema():
    spec = ToolSpec("look", "", {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]})
    assert "'where' of look is missing" in check_arguments(spec, {})
    free = ToolSpec("free", "", {"type": "object"})
    assert check_arguments(free, {"anything": 1}) is None


def test_schemas_are_what_chat_templates_expect():
    for name, spec in SANDBOX_TOOLS.items():
        schema = json.loads(json.dumps(spec.schema()))
        assert schema["type"] == "function"
        assert schema["function"]["name"] == name
        assert set(schema["function"]["parameters"]["required"]) <= set(schema["function"]["parameters"]["properties"])
        assert len(spec.description) > 100
