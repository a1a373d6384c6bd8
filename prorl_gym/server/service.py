"""Service: the composition root. It owns every part and the order in which they come up and go down.

Nothing here is a module-global: two services can live in one process.
"""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Iterable
from typing import Any

from prorl_gym.backends.registry import DEFAULT_POLICY, BackendRegistry
from prorl_gym.config.models import ProrlConfig
from prorl_gym.errors import ConfigError, RuntimeStartError
from prorl_gym.handlers.base import HandlerContext
from prorl_gym.handlers.registry import HandlerRegistry
from prorl_gym.handlers.web import web_tools
from prorl_gym.logs import hide
from prorl_gym.pipeline import Pipeline
from prorl_gym.rollout.policy import Policy
from prorl_gym.runtimes.base import Runtime, RuntimeKind, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory
from prorl_gym.runtimes.images import RuntimeImageBuilder
from prorl_gym.runtimes.on_demand import OnDemandRuntime
from prorl_gym.server.bodies import AddLlmServer, ClearLlmServer, RemoveLlmServer
from prorl_gym.types import LlmServer

log = logging.getLogger(__name__)


class Service:
    """All parts of the rollout service, without its HTTP face.

    Attributes:
        config: What it was made from.
        instance_id: New for each Service: a client that sees it change registers its backends again.
        token: The bearer token that requests must carry; None asks for none.
    """

    def __init__(self, config: ProrlConfig) -> None:
        self.config = config
        self.instance_id = uuid.uuid4().hex
        self.token = read_token(config)
        refuse_open_door(config, self.token)
        self.backends = BackendRegistry(config.backend)
        images = RuntimeImageBuilder(config)
        self.runtimes = RuntimeFactory(config.runtime, config.paths, locate=images.locate)
        self._policies: dict[str, Policy] = {}
        self.web = web_tools(config)
        self.handlers = HandlerRegistry(config, self._context)
        self.pipeline = Pipeline(config, self.handlers)
        self._exit: asyncio.Future[float | None] | None = None

    def policy(self, name: str) -> Policy:
        """The policy of that name, made when first asked for."""
        if name not in self._policies:
            self._policies[name] = Policy(name, self.config.policy, self.backends.pool(name))
        return self._policies[name]

    def sandbox(self, spec: SandboxSpec) -> Runtime:
        """A sandbox, not started; of a kind that no environment announced, prepared when it is first started."""
        try:
            return self.runtimes.create(spec)
        except RuntimeStartError:
            return OnDemandRuntime(spec, self.runtimes)

    async def start(self) -> None:
        """Bring everything up; when a part fails, what was up goes down again.

        Raises:
            ConfigError: This host or this configuration cannot work; says why and what helps.
        """
        began = time.monotonic()
        try:
            if self.config.policy.model != "auto":
                self._preload(DEFAULT_POLICY)
            await self.runtimes.sweep()
            await self.runtimes.prepare(runtime_kinds(self.config))
            for variable in (self.config.backend.api_key_env, *self.config.backend.api_key_envs):
                hide(os.environ.get(variable or ""))
            await self.backends.start()
            if self.config.backend.addresses:
                self._preload(DEFAULT_POLICY)
            if self.web is not None:
                await self.web.start()
            await self.handlers.start()
            if self.config.server.autostart:
                await self.pipeline.start()
        except BaseException:
            await self.stop()
            raise
        log.info("service started in %.1f s: tasks %s", time.monotonic() - began, ", ".join(self.handlers.names()))

    async def start_pools(self) -> None:
        """Take jobs; harmless when they are taken already."""
        await self.pipeline.start()

    async def stop(self) -> None:
        """End all jobs, then every part; bounded, idempotent, fine after a failed start. What fails is logged.

        Each part may take what the ones before it left over, up to its share of `server.shutdown_s`.
        """
        began = time.monotonic()
        for part, stop, share in (
            ("the jobs", self.pipeline.stop, 0.6),
            ("the handlers", self.handlers.stop, 0.7),
            ("the web tools", self._stop_web, 0.72),
            ("the policies", self._stop_policies, 0.75),
            ("the sandboxes", self.runtimes.stop, 0.85),
            ("the backends", self.backends.stop, 0.9),
        ):
            try:
                async with asyncio.timeout(began + share * self.config.server.shutdown_s - time.monotonic()):
                    await stop()
            except Exception as error:  # noqa: BLE001 - one part that does not go down must not keep up the others
                log.error("%s did not stop: %s", part, str(error) or type(error).__name__)
        for leftover in self.leftovers():
            log.error("could not be ended: %s", leftover)

    def llm_servers(self) -> list[LlmServer]:
        """Every registered endpoint of every policy; `detail` also says when a policy's jobs are refused."""
        return [self._with_refusal(server) for server in self.backends.servers()]

    def leftovers(self) -> list[dict[str, Any]]:
        """What could not be freed, and is tried again."""
        return [*self.pipeline.snapshot().leftovers, *self.runtimes.leftovers()]

    async def add_llm_server(self, body: AddLlmServer) -> LlmServer:
        """Register an inference endpoint; the same address again updates it."""
        server = await self.backends.pool(body.policy).add(
            body.address,
            policy_version=body.policy_version,
            dialect=body.dialect,
            model=body.model,
            api_key_env=body.api_key_env,
        )
        self._preload(body.policy)
        return self._with_refusal(server)

    async def clear_llm_server(self, body: ClearLlmServer) -> list[LlmServer]:
        """Take a policy's endpoints away; gives those that were there."""
        pool = self.backends.pool(body.policy)
        there = pool.servers()
        await pool.clear(in_flight=body.in_flight)
        return there

    async def remove_llm_server(self, body: RemoveLlmServer) -> bool:
        """Take one endpoint away; False when there was none of that address."""
        return await self.backends.pool(body.policy).remove(body.address)

    def request_exit(self, *, drain_s: float | None = 0.0) -> None:
        """Ask whoever serves this service to end the process; a second request changes nothing.

        Args:
            drain_s: How long jobs may take to end by themselves; None waits for all of them.
        """
        future = self._exit_future()
        if not future.done():
            future.set_result(drain_s)

    async def exit_requested(self) -> float | None:
        """Wait for `request_exit`; gives its `drain_s`."""
        return await asyncio.shield(self._exit_future())

    def _exit_future(self) -> "asyncio.Future[float | None]":
        if self._exit is None:
            self._exit = asyncio.get_running_loop().create_future()
        return self._exit

    def _preload(self, policy: str) -> None:
        """Get a policy's renderer ready before a job asks; only environments are known to ask for one."""
        if self.config.environments:
            self.policy(policy).preload()

    async def _stop_web(self) -> None:
        if self.web is not None:
            await self.web.stop()

    async def _stop_policies(self) -> None:
        for policy in self._policies.values():
            await policy.stop()

    def _with_refusal(self, server: LlmServer) -> LlmServer:
        policy = self._policies.get(server.policy)
        if policy is None or policy.refusal is None or server.detail is not None:
            return server
        return server.model_copy(update={"detail": policy.refusal})

    def _context(self, task: str) -> HandlerContext:
        return HandlerContext(task, self.config, policy=self.policy, sandbox=self.sandbox, web=self.web)


def read_token(config: ProrlConfig) -> str | None:
    """The bearer token out of the environment.

    Raises:
        ConfigError: `server.token_env` names a variable that is not set, or empty.
    """
    name = config.server.token_env
    if name is None:
        return None
    token = os.environ.get(name, "").strip()
    if not token:
        raise ConfigError(f"server.token_env={name}: that environment variable is not set; export {name}=SECRET")
    hide(token)
    return token


def refuse_open_door(config: ProrlConfig, token: str | None) -> None:
    """Refuse sandboxes on the host's network while anybody on it may command the service.

    Raises:
        ConfigError: Names the task.
    """
    if token is not None or config.server.insecure:
        return
    open_tasks = [
        environment.name
        for environment in config.environments
        if (sandbox := environment.agent.sandbox) is not None
        and "host" in (sandbox.network or config.runtime.network, sandbox.setup_network if sandbox.setup else None)
    ]
    if open_tasks or config.runtime.network == "host":
        whose = f"the sandboxes of {', '.join(open_tasks)}" if open_tasks else "sandboxes"
        raise ConfigError(
            f"network: host (or setup_network: host) lets {whose} reach this service's port; "
            "set server.token_env=NAME (bearer token in $NAME), or server.insecure=true"
        )


def runtime_kinds(config: ProrlConfig) -> set[RuntimeKind]:
    """The kinds of sandbox that the configured environments use."""
    sandboxes: Iterable[Any] = (environment.agent.sandbox for environment in config.environments)
    return {sandbox.runtime or config.runtime.kind for sandbox in sandboxes if sandbox is not None}
