"""From NeMo Gym's tree (instance → server type → implementation → fields) to the tasks that can be served.

The invariant: each agent instance is one task, joined with the resources server it names; nothing of a foreign agent or
of an unknown server slips in silently.
"""

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from prorl_gym.config.models import AgentConfig, Environment, ResourcesServerConfig
from prorl_gym.config.roots import Root, known_folders
from prorl_gym.config.suggest import did_you_mean, nearest, render_errors
from prorl_gym.errors import ConfigError

RESOURCES, AGENTS, MODELS, ENVIRONMENTS = (
    "resources_servers", "responses_api_agents", "responses_api_models", "environment_servers",
)  # fmt: skip
SERVER_TYPES = (RESOURCES, AGENTS, MODELS, ENVIRONMENTS)
AGENT_SUFFIX = "_agent"
_EQUIVALENT_AGENTS = {"simple_agent": "tool_calling"}
_GYM_ONLY_FIELDS = frozenset({
    "name", "host", "port", "num_workers", "domain", "verified", "value", "skip_verification",
    "skip_verification_reward", "token_id_capture", "tool_accesses",
})  # fmt: skip
"""Of NeMo Gym's agents: how it runs them as servers, which ours are not."""

_M = TypeVar("_M", bound=BaseModel)


@dataclass(slots=True)
class GymTasks:
    """What a Gym tree says.

    Attributes:
        environments: The tasks, in the tree's order.
        addresses: Inference endpoints that the agents' model servers name.
        api_key_env: Name of the environment variable that holds those endpoints' key.
        warnings: What was set aside, and why.
    """

    environments: list[Environment] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    api_key_env: str | None = None
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Server:
    path: str
    implementation: str
    fields: dict[str, Any]


def read_tasks(tree: dict[str, Any], roots: Sequence[Root]) -> GymTasks:
    """Join a tree's instances into tasks. Its directives are expanded, its interpolations are not resolved yet.

    Raises:
        ConfigError: Names the key and, where one is near, the name that was meant.
    """
    tasks = GymTasks()
    tree = deepcopy(tree)
    api_keys = {name: _take_api_keys(server, tree) for name, server in _servers(tree, MODELS).items()}
    resolved = _resolve(tree)
    resources, models = _servers(resolved, RESOURCES), _servers(resolved, MODELS)
    for name in _servers(resolved, ENVIRONMENTS):
        tasks.warnings.append(
            f"gym.{name}: environment servers are NeMo Gym's own; ignored, the service takes their part"
        )
    for name, server in _servers(resolved, AGENTS).items():
        environment = _join(name, server, resources, tuple(roots), tasks.warnings)
        tasks.environments.append(environment)
        model = environment.agent.model_server.name if environment.agent.model_server else None
        if model in models:
            _seed_backends(tasks, models[model], api_keys[model])
    _refuse_clashes([environment.name for environment in tasks.environments])
    return tasks


def _servers(tree: dict[str, Any], wanted: str) -> dict[str, _Server]:
    found = {}
    for name, instance in tree.items():
        if not isinstance(instance, dict):
            continue  # Gym's own plain values, e.g. policy_base_url
        kinds = [kind for kind in SERVER_TYPES if kind in instance]
        if not kinds:
            for key in instance:
                if guess := nearest(str(key), SERVER_TYPES):
                    raise ConfigError(f"gym.{name}.{key}: unknown server type; did you mean {guess}?")
            continue
        if len(instance) != 1:
            raise ConfigError(f"gym.{name}: one server type per instance, not {', '.join(map(str, instance))}")
        if kinds[0] != wanted:
            continue
        implementations = instance[wanted]
        if not isinstance(implementations, dict) or len(implementations) != 1:
            given = ", ".join(map(str, implementations)) if isinstance(implementations, dict) else repr(implementations)
            raise ConfigError(f"gym.{name}.{wanted}: exactly one implementation with its fields, not {given or 'none'}")
        ((implementation, fields),) = implementations.items()
        path = f"gym.{name}.{wanted}.{implementation}"
        if not isinstance(fields, dict | None):
            raise ConfigError(f"{path}: a mapping of fields, not {fields!r}")
        found[name] = _Server(path, implementation, fields or {})
    return found


def _resolve(tree: dict[str, Any]) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    root = OmegaConf.create(tree)
    resolved = {}
    for name, instance in tree.items():
        if isinstance(instance, dict):  # plain values are resolved where they are used, so unused secrets never are
            try:
                resolved[name] = OmegaConf.to_container(root[name], resolve=True, throw_on_missing=True)
            except OmegaConfBaseException as e:
                reason = str(e.msg or e).splitlines()[0]
                key = f"gym.{e.full_key or name}"
                raise ConfigError(
                    f"{key}: {reason}; names are looked up below gym, e.g. gym.policy_base_url=URL"
                ) from None
    return resolved


def _join(
    name: str, server: _Server, resources: dict[str, _Server], roots: tuple[Root, ...], warnings: list[str]
) -> Environment:
    agent_type = _EQUIVALENT_AGENTS.get(server.implementation, server.implementation)
    known = known_folders(roots, "agents")
    if agent_type not in known:
        raise ConfigError(
            f"{server.path}: agents/{agent_type} is in no search root; another system's agents cannot run here"
            f"{did_you_mean(agent_type, known)}"
        )
    fields = dict(server.fields)
    if agent_type != server.implementation:
        for foreign in sorted(_GYM_ONLY_FIELDS & fields.keys()):
            warnings.append(f"{server.path}.{foreign}: means nothing here; ignored")
            del fields[foreign]
        if not fields.get("tools"):
            fields.setdefault("sandbox", None)  # Gym's simple_agent has the resources server's tools only
    agent = _validated(AgentConfig, fields, server.path)
    if agent.resources_server is None:
        return Environment(name=name, agent_type=agent_type, agent=agent)
    reference = agent.resources_server
    if reference.type != RESOURCES or reference.name not in resources:
        raise ConfigError(
            f"{server.path}.resources_server: no {RESOURCES} instance named {reference.name!r}"
            f"{did_you_mean(reference.name, resources)}"
        )
    target = resources[reference.name]
    config = _validated(ResourcesServerConfig, target.fields, target.path)
    folders = known_folders(roots, RESOURCES)
    if config.url is None and target.implementation not in folders:
        raise ConfigError(
            f"{target.path}: {RESOURCES}/{target.implementation} is in no search root; name a folder, or the "
            f"`url` of a running server{did_you_mean(target.implementation, folders)}"
        )
    return Environment(
        name=name,
        agent_type=agent_type,
        agent=agent,
        resources_type=target.implementation,
        resources_name=reference.name,
        resources=config,
    )


def _validated(model: type[_M], fields: dict[str, Any], path: str) -> _M:
    try:
        return model.model_validate(fields)
    except ValidationError as e:
        raise ConfigError(render_errors(e, model, path)) from None


def _take_api_keys(server: _Server, tree: dict[str, Any]) -> str | None:
    """Remove the key, so that no secret is resolved; return the environment variable that it names."""
    value = server.fields.pop("api_key", None)
    for _ in range(2):  # Gym's `${policy_api_key}`, then `${oc.env:NAME}`
        if isinstance(value, str) and (link := re.fullmatch(r"\$\{(\w+)\}", value)):
            value = tree.get(link[1])
    named = re.fullmatch(r"\$\{oc\.env:\s*(\w+)\s*(,.*)?\}", value) if isinstance(value, str) else None
    return named[1] if named else None


def _seed_backends(tasks: GymTasks, server: _Server, api_key_env: str | None) -> None:
    listed = server.fields.get("base_url") or []
    addresses = [listed] if isinstance(listed, str) else listed
    if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
        raise ConfigError(f"{server.path}.base_url: an address or a list of them, not {listed!r}")
    tasks.addresses.extend(address for address in addresses if address not in tasks.addresses)
    tasks.api_key_env = tasks.api_key_env or api_key_env


def task_alias(name: str) -> str:
    """The short name under which an agent instance can be asked for."""
    return name.removesuffix(AGENT_SUFFIX) or name


def _refuse_clashes(names: list[str]) -> None:
    owners: dict[str, str] = {}
    for name in names:
        for claimed in {name, task_alias(name)}:
            if other := owners.get(claimed):
                raise ConfigError(
                    f"gym.{name}: the task name {claimed!r} belongs to gym.{other} already (an agent is known by its "
                    f"name with and without {AGENT_SUFFIX}); rename one"
                )
            owners[claimed] = name
