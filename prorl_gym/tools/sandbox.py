"""The tools that run in the sandbox: what the model is told of them, and the check of what it sends.

The invariant: a call that passes the check can be executed as it stands; one that does not is answered with a message
that says how to do it right, and nothing runs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from prorl_gym.runtimes.loopback import ADDRESS_VARIABLE
from prorl_gym.tools.spec import ToolSpec

_MAX_TEXT_BYTES = 16 << 20
_TYPES: dict[str, Callable[[object], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}

_TIMEOUT = {
    "type": "number",
    "exclusiveMinimum": 0,
    "description": "Seconds after which the call is interrupted; its output so far is returned.",
}

BASH = ToolSpec(
    "bash",
    "Run a command in a persistent bash shell. Working directory, variables, functions and background processes last "
    "from one call to the next; `set -e` lasts for one call only. Commands read an empty standard input; pagers and "
    "editors are off. Returns standard output and error together; long output keeps its beginning and its end. "
    "A command that takes too long is interrupted: start servers and other long-lived programs in the background "
    "with `&`.",
    {
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command; it may have many lines."},
            "timeout_s": _TIMEOUT,
        },
        "required": ["command"],
    },
)

IPYTHON = ToolSpec(
    "ipython",
    "Run a cell of Python code in a persistent IPython session. Variables, imports and functions last from one call to "
    "the next. Returns what the cell printed and the value of its last expression, or the traceback. `input()` is not "
    "available.",
    {
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "The cell: plain Python code, without Markdown fences."},
            "timeout_s": _TIMEOUT,
        },
        "required": ["code"],
    },
)

FILE_EDITOR = ToolSpec(
    "file_editor",
    "View and edit text files. Paths are absolute or relative to the working directory that the tools start in.\n"
    "view: a file with line numbers (view_range selects lines), or the names in a directory, two levels deep.\n"
    "create: a new file with file_text; an existing file is never overwritten.\n"
    "str_replace: replaces old_str, which must occur exactly once (white space counts; take enough lines around it), "
    "with new_str.\n"
    "insert: puts new_str after line insert_line; 0 puts it at the start of the file.\n"
    "undo_edit: takes back the last edit of the file made with this tool.",
    {
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "enum": ["view", "create", "str_replace", "insert", "undo_edit"],
                "description": "What to do.",
            },
            "path": {"type": "string", "description": "The file, or for view also a directory."},
            "file_text": {"type": "string", "description": "For create: the whole content."},
            "old_str": {"type": "string", "description": "For str_replace: the text to be replaced."},
            "new_str": {"type": "string", "description": "For str_replace and insert: the new text."},
            "insert_line": {"type": "integer", "description": "For insert: the line to insert after."},
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "minItems": 2,
                "maxItems": 2,
                "description": "For view: first and last line, from 1; -1 as the last is the end of the file.",
            },
        },
        "required": ["command", "path"],
    },
)

SANDBOX_TOOLS: dict[str, ToolSpec] = {spec.name: spec for spec in (BASH, IPYTHON, FILE_EDITOR)}
"""By name."""
_SHARED_NETWORK = (
    f" The network is shared with other programs: let a server that you start listen on the address in the environment "
    f"variable {ADDRESS_VARIABLE}, which is yours alone, not on localhost or 0.0.0.0, where its port may be taken."
)
HOST_NETWORK_TOOLS: dict[str, ToolSpec] = {
    spec.name: replace(spec, description=spec.description + _SHARED_NETWORK) for spec in (BASH, IPYTHON)
}
"""What is said of these instead where the sandbox has `network: host`."""

_EDITOR_NEEDS = {"create": ("file_text",), "str_replace": ("old_str",), "insert": ("insert_line", "new_str")}


def check_arguments(spec: ToolSpec, arguments: object) -> str | None:
    """What is wrong with the arguments of a call, as a message for the model; None when they are right.

    Works for any tool whose schema is a plain object of typed properties.
    """
    if not isinstance(arguments, dict):
        return f"The arguments of {spec.name} must be a JSON object, not {_kind(arguments)}."
    properties: dict[str, dict[str, Any]] = spec.parameters.get("properties", {})
    known = ", ".join(properties) or "none"
    required = [*spec.parameters.get("required", ())]
    if spec.name == FILE_EDITOR.name and isinstance(command := arguments.get("command"), str):
        required += _EDITOR_NEEDS.get(command, ())
    for name in required:
        if arguments.get(name) is None:
            return f"The argument {name!r} of {spec.name} is missing. Its arguments are: {known}."
    open_ended = bool(spec.parameters.get("additionalProperties", not properties))
    for name, value in arguments.items():
        if name not in properties and not open_ended:
            return f"{spec.name} has no argument {name!r}. Its arguments are: {known}."
        if name in properties and value is not None and (problem := _problem(properties[name], value)):
            return f"The argument {name!r} of {spec.name} {problem}."
    return None


def _problem(schema: dict[str, Any], value: object) -> str | None:
    wanted = schema.get("type")
    problem: str | None = None
    if isinstance(wanted, str) and wanted in _TYPES and not _TYPES[wanted](value):
        problem = f"must be {'an' if wanted[0] in 'aio' else 'a'} {wanted}, not {_kind(value)}"
    elif "enum" in schema and value not in schema["enum"]:
        problem = f"must be one of {', '.join(map(str, schema['enum']))}, not {str(value)[:100]!r}"
    elif isinstance(value, str):
        problem = _text_problem(value)
    elif isinstance(value, int | float) and "exclusiveMinimum" in schema and not value > schema["exclusiveMinimum"]:
        problem = f"must be greater than {schema['exclusiveMinimum']}"
    elif isinstance(value, list):
        problem = _list_problem(schema, value)
    return problem


def _list_problem(schema: dict[str, Any], value: list[object]) -> str | None:
    fewest, most = schema.get("minItems", 0), schema.get("maxItems", len(value))
    if not fewest <= len(value) <= most:
        wanted = f"{fewest} items" if fewest == most else f"{fewest} to {most} items"
        return f"must have {wanted}, not {len(value)}"
    problems = (_problem(schema.get("items", {}), item) for item in value)
    return next((f"holds an item that {problem}" for problem in problems if problem), None)


def _text_problem(text: str) -> str | None:
    if "\0" in text:
        return "holds a NUL character, which no command or file name can hold"
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        return f"holds half a character, {text[error.start]!a}, at position {error.start}: send the whole character"
    return f"has {size} bytes, more than the {_MAX_TEXT_BYTES} allowed" if size > _MAX_TEXT_BYTES else None


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)
