"""From overrides to the one frozen `ProrlConfig`.

The invariant: Hydra chooses and merges files, nothing else; values from the command line are laid over the result, and
the whole is validated once. Every mistake is a ConfigError that names the key.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from prorl_gym.config.directives import expand_directives, load_config_paths
from prorl_gym.config.gym_tree import GymTasks, read_tasks, task_alias
from prorl_gym.config.models import ProrlConfig
from prorl_gym.config.overrides import Override, apply_override, merged, parse_override
from prorl_gym.config.roots import Root, search_roots
from prorl_gym.config.suggest import MADE_KEYS, did_you_mean, nearest, render_errors
from prorl_gym.errors import ConfigError

if TYPE_CHECKING:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

_PRIMARY = "config"
_INSTANCE_DEPTH = 2


@dataclass(frozen=True, slots=True)
class Composition:
    """A composed configuration and where it came from.

    Attributes:
        config: Validated.
        gym: NeMo Gym's tree, directives expanded, interpolations unresolved.
        sources: One line per file, in the order they were merged: name, folder, who named the folder.
        warnings: What was set aside.
    """

    config: ProrlConfig
    gym: dict[str, Any]
    sources: tuple[str, ...]
    warnings: tuple[str, ...]


def load_config(overrides: Sequence[str] = ()) -> ProrlConfig:
    """Compose and validate.

    Raises:
        ConfigError: Names the key and what it accepts.
    """
    return compose(overrides).config


def compose(overrides: Sequence[str] = ()) -> Composition:
    """Compose and validate, and say where everything came from.

    Raises:
        ConfigError: Names the key and what it accepts.
    """
    roots = search_roots()
    groups = _Groups(roots)
    parsed = [parse_override(line) for line in overrides]
    choices = [override for override in parsed if groups.chosen_by(override)]
    values = [override for override in parsed if override not in choices]
    tree, sources = groups.compose(choices)
    gym = _gym_tree(tree.pop("gym", None) or {}, [v for v in values if _is_gym(v)], roots)
    for override in values:
        if not _is_gym(override):
            apply_override(tree, override)
    tasks = read_tasks(gym, roots)
    config = _validate(_resolve(tree), tasks, roots)
    return Composition(config, gym, tuple(sources), tuple(tasks.warnings))


class _Groups:
    """Hydra's part: the options of each group over all roots, and the merge of those chosen."""

    def __init__(self, roots: tuple[Root, ...]) -> None:
        self._roots = roots
        self._loader = _loader(roots)

    def chosen_by(self, override: Override) -> bool:
        """Whether the override chooses an option instead of setting a value."""
        if "/" in override.key or "@" in override.key:
            return True
        return not isinstance(override.value, dict) and bool(self.options(override.key))

    def options(self, group: str) -> list[str]:
        from hydra.core.object_type import ObjectType

        return [] if "." in group else list(self._loader.get_group_options(group, ObjectType.CONFIG))

    def compose(self, choices: list[Override]) -> tuple[dict[str, Any], list[str]]:
        """The merged tree, unresolved, and a line for each file in it."""
        import yaml
        from hydra.errors import HydraException
        from hydra.types import RunMode
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        self._check(choices)
        lines = [override.line for override in choices]
        try:
            composed = self._loader.load_configuration(_PRIMARY, lines, run_mode=RunMode.RUN, from_shell=False)
            files = self._loader.compute_defaults_list(_PRIMARY, lines, RunMode.RUN).defaults
        except yaml.YAMLError as e:
            raise ConfigError(f"not YAML: {e}") from None
        except (HydraException, OmegaConfBaseException, ValueError) as e:
            reason = str(e.__cause__ or e).split("\nConfig search path:")[0].strip()
            raise ConfigError(f"cannot compose {' '.join(lines) or 'the configuration'}: {reason}") from None
        tree = OmegaConf.to_container(composed, resolve=False)
        assert isinstance(tree, dict)  # noqa: S101 - the primary config is a mapping
        tree.pop("hydra", None)
        paths = [str(file.config_path) for file in files if file.config_path]
        sources = [self._origin(path) for path in paths if not path.startswith("hydra/")]
        return {str(key): value for key, value in tree.items()}, sources

    def _check(self, choices: list[Override]) -> None:
        for key, times in Counter(override.key for override in choices).items():
            if times > 1:
                same = [override for override in choices if override.key == key]
                names = dict.fromkeys(
                    str(v) for o in same for v in (o.value if isinstance(o.value, list) else [o.value])
                )
                advice = f"write '{key}=[{','.join(names)}]'" if key == "environment" else "keep one of them"
                chosen = " ".join(override.line for override in same)
                raise ConfigError(f"{key}: chosen {times} times ({chosen}), and only one would count; {advice}")
        for override in choices:
            if override.action == "delete":
                continue
            options = self.options(override.key)
            listed = override.value if isinstance(override.value, list) else [override.value]
            for option in listed:
                if isinstance(option, str) and option not in options:
                    known = f"; known: {', '.join(options) or 'none'}"
                    guess = f"; did you mean {near}?" if (near := nearest(option, options)) else ""
                    raise ConfigError(f"{override.key}: no option {option!r}{guess}{known}")
                if not isinstance(option, str) and (option is not None or isinstance(override.value, list)):
                    raise ConfigError(f"{override.key}: an option's name, not {option!r}; known: {', '.join(options)}")
            if override.value is None and override.key == "environment":
                raise ConfigError("environment: a list of names; for none write 'environment=[]'")

    def _origin(self, path: str) -> str:
        candidates = [self._roots[-1]] if path == _PRIMARY else self._roots
        for root in candidates:
            if (root.conf / f"{path}.yaml").is_file():
                return f"{path} from {root.conf} ({root.origin})"
        return path


def _loader(roots: tuple[Root, ...]) -> "ConfigLoaderImpl":
    # Hydra's own `searchpath` lets the bundle win over the user and would take a user's config.yaml as primary; a
    # search path built here puts the roots first and shows Hydra their groups only.
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins

    class RootSource(FileConfigSource):  # type: ignore[misc]
        """A root's groups without its top level."""

        @staticmethod
        def scheme() -> str:
            return "prorl-gym-root"

        def is_config(self, config_path: str) -> bool:
            return "/" in config_path and bool(super().is_config(config_path))

    Plugins.instance()  # registers Hydra's own sources
    SourcesRegistry.instance().types[RootSource.scheme()] = RootSource
    search_path = ConfigSearchPathImpl()
    for root in roots[:-1]:
        if root.conf.is_dir():
            search_path.append(root.origin, f"{RootSource.scheme()}://{root.conf}")
    search_path.append("main", f"file://{roots[-1].conf}")
    search_path.append("hydra", "pkg://hydra.conf")
    search_path.append("schema", "structured://")
    return ConfigLoaderImpl(search_path)


def _is_gym(override: Override) -> bool:
    return override.key == "gym" or override.key.startswith("gym.")


def _gym_tree(composed: dict[str, Any], overrides: list[Override], roots: tuple[Root, ...]) -> dict[str, Any]:
    holder = {"gym": dict(composed)}
    for override in overrides:
        if override.key == "gym.config_paths":
            apply_override(holder, override)
    files = load_config_paths(holder["gym"].pop("config_paths", None) or [], roots)
    holder["gym"] = merged(files, holder["gym"])
    for override in overrides:
        parts = override.key.split(".")
        if parts[1:] == ["config_paths"]:
            continue
        if override.action == "set" and len(parts) > _INSTANCE_DEPTH and parts[1] not in holder["gym"]:
            raise ConfigError(
                f"{override.key}: no instance {parts[1]!r} below gym{did_you_mean(parts[1], holder['gym'])}"
                f" (a new one is added by +{override.line})"
            )
        apply_override(holder, override)
    if not isinstance(holder["gym"], dict):
        raise ConfigError(f"gym: a mapping of instances, not {holder['gym']!r}")
    return expand_directives(holder["gym"])


def _resolve(tree: dict[str, Any]) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.register_new_resolver("prorl.uid", os.getuid, replace=True)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as e:
        raise ConfigError(f"{e.full_key or 'configuration'}: {str(e.msg or e).splitlines()[0]}") from None
    assert isinstance(resolved, dict)  # noqa: S101 - a mapping went in
    return {str(key): value for key, value in resolved.items()}


def _validate(settings: dict[str, Any], tasks: GymTasks, roots: tuple[Root, ...]) -> ProrlConfig:
    for reserved in MADE_KEYS:
        if reserved in settings:
            raise ConfigError(f"{reserved}: made from gym and the search roots, it cannot be set")
    backend = settings.get("backend")
    if isinstance(backend, dict) and tasks.addresses and isinstance(backend.get("addresses", []), list):
        own = backend.get("addresses", [])
        addresses = [*own, *(address for address in tasks.addresses if address not in own)]
        key = backend.get("api_key_env") or tasks.api_key_env
        settings = {**settings, "backend": {**backend, "addresses": addresses, "api_key_env": key}}
    extra = {"environments": tuple(tasks.environments), "roots": tuple(root.path for root in roots)}
    try:
        config = ProrlConfig.model_validate({**settings, **extra})
    except ValidationError as e:
        raise ConfigError(render_errors(e, ProrlConfig)) from None
    names = {name for e in config.environments for name in (e.name, task_alias(e.name))}
    for key, claimed in (("handlers", config.handlers), ("task_aliases", config.task_aliases)):
        for name in claimed:
            if name in names:
                raise ConfigError(f"{key}.{name}: an agent below gym has that name already; rename one")
    return config
