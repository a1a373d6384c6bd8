"""NeMo Gym's own directives in a configuration tree: `config_paths`, `_inherit_from`, `_copy`, `_delete_key`.

The invariant: everything here works on plain containers with interpolations still unresolved, so that what a directive
removes never has to resolve.

Source: the behaviour of NeMo Gym 0.7.0's global configuration parser.
"""

import re
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

from prorl_gym.config.overrides import merged
from prorl_gym.config.roots import Root
from prorl_gym.config.suggest import did_you_mean
from prorl_gym.errors import ConfigError

_INLINE = re.compile(r"\$\{(inherit_from|copy):(.+)\}")


def load_config_paths(listed: object, roots: Iterable[Root]) -> dict[str, Any]:
    """Merge the files of a `config_paths` list, later over earlier, each over the files that it lists itself.

    Raises:
        ConfigError: Not a list of paths, a file that is in no root or no mapping, or files that list each other.
    """
    return _load_listed(listed, tuple(roots), "gym.config_paths", ())


def _load_listed(listed: object, roots: tuple[Root, ...], key: str, above: tuple[Path, ...]) -> dict[str, Any]:
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise ConfigError(f"{key}: a list of paths, not {listed!r}")
    tree: dict[str, Any] = {}
    for entry in listed:
        path = _find(entry, roots, key)
        if path in above:
            raise ConfigError(f"{key}: {entry} lists itself, by way of {' → '.join(p.name for p in above)}")
        own = read_yaml(path)
        inner = _load_listed(own.pop("config_paths", None) or [], roots, f"config_paths in {path}", (*above, path))
        tree = merged(tree, merged(inner, own))
    return tree


def _find(entry: str, roots: tuple[Root, ...], key: str) -> Path:
    places = [Path.cwd() / entry, *(root.path / entry for root in roots)]
    for place in places:
        if place.is_file():
            return place.resolve()
    raise ConfigError(f"{key}: no file {entry!r}; looked for {', '.join(dict.fromkeys(map(str, places)))}")


def read_yaml(path: Path) -> dict[str, Any]:
    """One YAML mapping, interpolations unresolved.

    Raises:
        ConfigError: Not YAML, or not a mapping; names the file.
    """
    import yaml
    from omegaconf import OmegaConf

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (yaml.YAMLError, OSError, ValueError) as e:
        raise ConfigError(f"{path}: {e}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a mapping is expected at the top")
    return {str(key): value for key, value in tree.items()}


def expand_directives(tree: dict[str, Any]) -> dict[str, Any]:
    """A new tree without directives. What was inherited from is gone (Gym moves it), what was copied stays.

    Raises:
        ConfigError: A directive that names nothing, or itself.
    """
    expansion = _Expansion(tree)
    result: dict[str, Any] = expansion.build(tree, "gym")
    for source in expansion.moved:
        *parents, last = source.split(".")
        node: Any = result
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(last, None)
    return result


class _Expansion:
    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree
        self.moved: list[str] = []
        self._open: list[str] = []

    def build(self, node: Any, path: str) -> Any:
        if isinstance(node, list):
            return [self.build(item, f"{path}.{i}") for i, item in enumerate(node)]
        if isinstance(node, str) and (inline := _INLINE.fullmatch(node)):
            return self._source(inline[2], moves=inline[1] == "inherit_from", path=path)
        if not isinstance(node, dict):
            return node
        own = dict(node)
        inherited, copied = own.pop("_inherit_from", None), own.pop("_copy", None)
        unwanted = {key.strip() for key in str(own.pop("_delete_key", "")).split(",")} - {""}
        for source, moves in ((copied, False), (inherited, True)):
            if source is not None:
                base = self._source(str(source), moves=moves, path=path)
                if not isinstance(base, dict):
                    raise ConfigError(f"{path}: {source!r} is a plain value, it cannot be merged with keys")
                own = merged(base, own)  # before the keys inside are built: their directives see what was inherited
        missing = unwanted - own.keys()
        if missing and (inherited or copied):
            key = min(missing)
            raise ConfigError(f"{path}._delete_key: there is no {key!r}{did_you_mean(key, map(str, own))}")
        return {key: self.build(value, f"{path}.{key}") for key, value in own.items() if key not in unwanted}

    def _source(self, source: str, *, moves: bool, path: str) -> Any:
        if source in self._open:
            raise ConfigError(f"{path}: {source!r} inherits from itself")
        node: Any = self.tree
        for part in source.split("."):
            if not isinstance(node, dict) or part not in node:
                known = map(str, node) if isinstance(node, dict) else ()
                raise ConfigError(f"{path}: inherits from {source!r}, which is not there{did_you_mean(part, known)}")
            node = node[part]
        if moves:
            self.moved.append(source)
        self._open.append(source)
        try:
            return deepcopy(self.build(node, f"gym.{source}"))
        finally:
            self._open.pop()
