"""One `key=value` from the command line: Hydra's grammar, with errors that show the quoting that works."""

import re
import shlex
from dataclasses import dataclass
from typing import Any, Literal

from prorl_gym.config.suggest import did_you_mean
from prorl_gym.errors import ConfigError

_SHAPE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]+)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Override:
    """A parsed override.

    Attributes:
        line: As it was written.
        key: Dotted; the name of a group when it chooses an option.
        value: In plain Python types; None for a deletion.
        action: `set` changes or adds a value, `add` (`+`, `++`) says that the key is meant to be new, `delete` is `~`.
    """

    line: str
    key: str
    value: Any
    action: Literal["set", "add", "delete"]


def parse_override(line: str) -> Override:
    """Parse one override.

    Raises:
        ConfigError: Not `key=value`, or a value that Hydra's grammar reads otherwise; shows the quoting that works.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    shape = _SHAPE.fullmatch(line)
    if shape is None or (shape["value"] is None and shape["sign"] != "~"):
        raise ConfigError(f"{line!r} is not an override; write key=value, e.g. server.port=8006")
    key, raw = shape["key"], shape["value"] or ""
    try:
        parsed = OverridesParser.create().parse_override(line)
        sweep = parsed.is_sweep_override()
    except HydraException:
        raise ConfigError(f"{key}: Hydra's grammar cannot read {raw!r}; {_quoting(shape, raw)}") from None
    if sweep:
        as_list = shlex.quote(f"{shape['sign'] or ''}{key}=[{raw}]")
        offer = "" if "(" in raw else f"for a list write {as_list}; "
        raise ConfigError(f"{key}: {raw!r} would be a sweep, a run per value; {offer}{_quoting(shape, raw)}")
    if parsed.is_delete():
        return Override(line, key, None, "delete")
    return Override(line, key, parsed.value(), "add" if shape["sign"] else "set")


def apply_override(tree: dict[str, Any], override: Override) -> None:
    """Change `tree`, plain containers, in place. Mappings are merged, everything else is replaced.

    Raises:
        ConfigError: A deletion of what is not there, or a key below a plain value.
    """
    *parents, last = override.key.split(".")
    node: Any = tree
    for part in parents:
        if isinstance(node, dict) and (node.get(part) is None) and override.action != "delete":
            node[part] = {}
        node = _child(node, part, override)
    if override.action == "delete":
        _child(node, last, override)
        del node[int(last) if isinstance(node, list) else last]
    elif isinstance(node, list):
        _child(node, last, override)
        node[int(last)] = override.value
    elif not isinstance(node, dict):
        raise ConfigError(f"{override.key}: {parents[-1]} is a plain value, it has no keys")
    elif isinstance(override.value, dict) and isinstance(node.get(last), dict):
        node[last] = merged(node[last], override.value)
    else:
        node[last] = override.value


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """A new mapping in which `over` wins; mappings are merged all the way down, lists are replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def _child(node: Any, part: str, override: Override) -> Any:
    if isinstance(node, dict) and part in node:
        return node[part]
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    known = list(node) if isinstance(node, dict) else []
    raise ConfigError(f"{override.key}: there is no {part!r}{did_you_mean(part, map(str, known))}")


def _quoting(shape: re.Match[str], raw: str) -> str:
    if raw.startswith(("[", "{")):
        return f"""quote the texts inside, e.g. '{shape["key"]}=["a=b", "c,d"]' or '{shape["key"]}={{k: "a=b"}}'"""
    # Hydra unescapes a backslash only before a quote or at the end of the text.
    escaped = re.sub(r'(\\*)"', lambda m: m[1] * 2 + '\\"', raw)
    escaped = re.sub(r"(\\+)$", lambda m: m[1] * 2, escaped)
    return "as text write " + shlex.quote(f'{shape["sign"] or ""}{shape["key"]}="{escaped}"')
