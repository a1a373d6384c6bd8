"""The inference endpoints of one policy: who is registered, who serves which task, and what a swap does to both.

Invariant: every turn of a task goes to the backend it was assigned to, for as long as that one is healthy and may serve
it. A cleared backend's tasks stay linked to it, so that adding the same address again gives them back.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import chain
from typing import Literal

from prorl_gym.backends.address import normalise_address
from prorl_gym.backends.backend import Backend, Registration
from prorl_gym.backends.base import BackendFacts, LlmSession, Waiting
from prorl_gym.backends.change import Signal
from prorl_gym.backends.dialects import candidates
from prorl_gym.backends.patience import Patience
from prorl_gym.backends.routing import choose
from prorl_gym.backends.session import PoolSession, Task
from prorl_gym.backends.transport import Endpoint, EngineHttp
from prorl_gym.config.models import BackendConfig
from prorl_gym.errors import BackendError, NotRunning, RequestError
from prorl_gym.types import LlmServer

_log = logging.getLogger(__name__)

InFlight = Literal["continue", "park", "abort"]

_SETTLE_S = 0.1
_MAX_SETTLE_S = 1.0
"""Tasks that waited on an empty pool let the adds that follow the first one arrive: else all would go to that one."""


class BackendPool:
    """One policy's backends. Belongs to one event loop.

    Args:
        config: Routing, timeouts, defaults for `add`.
        policy: Whose backends these are.
    """

    def __init__(self, config: BackendConfig, policy: str = "default") -> None:
        self._config = config
        self._policy = policy
        self._http = EngineHttp(config.connect_timeout_s)
        self._open: dict[str, Backend] = {}
        self._cleared: dict[str, Backend] = {}
        self._tasks: dict[str, Task] = {}
        self._changed = Signal()
        self._last_add_s = 0.0
        self._calls = 0
        self._ending: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def start(self) -> None:
        """Accept backends (again, after a stop); idempotent."""
        self._stopped = False

    async def stop(self) -> None:
        """Forget every backend, end the calls in flight with a BackendError, close all connections; idempotent."""
        self._stopped = True
        for backend in chain(self._open.values(), self._cleared.values()):
            backend.standing = "parked"
            backend.cut("the service stops")
            self._unwatch(backend)
        self._open.clear()
        self._cleared.clear()
        self._changed.notify()
        if self._ending:
            await asyncio.wait(self._ending)
        await self._http.close()

    # -- registration ---------------------------------------------------------------------------------------------

    async def add(
        self,
        address: str,
        *,
        policy_version: int | None = None,
        dialect: str | None = None,
        model: str | None = None,
        api_key_env: str | None = None,
    ) -> LlmServer:
        """Register an engine, or renew its registration; None takes what the configuration says.

        An engine whose probe fails is kept as unhealthy, with the reason in `detail`, and watched until it answers. The
        version holds from this moment on, also for tasks that are there already. Cancelling leaves it registered.

        Raises:
            RequestError: The address, the dialect or the key's variable is not usable; nothing has changed.
            NotRunning: The pool is stopped.
        """
        if self._stopped:
            raise NotRunning("the service is stopping")
        address = normalise_address(address)
        endpoint = Endpoint(
            http=self._http,
            address=address,
            call_timeout_s=self._config.call_timeout_s,
            probe_timeout_s=self._config.connect_timeout_s,
            api_key=self._api_key(api_key_env),
        )
        dialects = candidates(dialect or self._config.dialect, endpoint, model)
        backend = self._register(address, Registration(dialects, model, policy_version))
        await backend.check(probe=True)
        self._last_add_s = asyncio.get_running_loop().time()
        self._changed.notify()
        return self._describe(backend)

    def _api_key(self, named: str | None) -> str | None:
        """The key out of the environment; only of a variable that the configuration lets out.

        Raises:
            RequestError: It is not listed, or holds no usable key.
        """
        own = self._config.api_key_env
        variable = named or own
        if variable is None:
            return None
        if variable != own and variable not in self._config.api_key_envs:
            raise RequestError(
                f"{variable!r} is none of the variables that may hold an engine's key; "
                "list it in the service's configuration: backend.api_key_envs",
                field="api_key_env",
            )
        value = os.environ.get(variable)
        if not value or not value.isascii() or not value.isprintable():
            raise RequestError(f"environment variable {variable!r} holds no usable key", field="api_key_env")
        return value

    def _register(self, address: str, registration: Registration) -> Backend:
        minimum = min((backend.assigned for backend in self._open.values()), default=0)
        backend = self._open.get(address) or self._cleared.pop(address, None)
        if backend is None:
            backend = Backend(address, registration, self._config, self._changed)
            backend.assigned = minimum
        else:
            backend.register(registration)
        self._open[address] = backend
        self._last_add_s = asyncio.get_running_loop().time()
        backend.start()
        return backend

    async def clear(self, in_flight: InFlight = "continue") -> None:
        """Unregister every backend; a second call is harmless.

        `continue`: tasks in flight keep their old backend to their end. `park`: returns when the calls in flight have
        ended; the next calls of their tasks wait for an add. `abort`: calls in flight are cut; their tasks go on, after
        the next add, from the prompt and whatever partial ids the engine itself had handed back. Cancelling ends only
        the wait.
        """
        opened, self._open = list(self._open.values()), {}
        affected = opened if in_flight == "continue" else opened + list(self._cleared.values())
        for backend in affected:
            self._set_aside(backend, "continuing" if in_flight == "continue" else "parked")
            if in_flight != "continue":
                backend.cut("the backends were cleared", sent=in_flight == "abort")
        _log.info("policy %s: %d backends cleared (%s)", self._policy, len(opened), in_flight)
        self._changed.notify()
        if in_flight != "continue":
            for backend in affected:
                await backend.drained()

    async def remove(self, address: str) -> bool:
        """Unregister one backend; False when it was not registered.

        Its calls in flight end there; the next calls of its tasks go to other backends, or wait for one.

        Raises:
            RequestError: The address is not usable.
        """
        backend = self._open.pop(normalise_address(address), None)
        if backend is None:
            return False
        self._set_aside(backend, "parked")
        backend.cut("the backend was removed", sent=False)
        self._changed.notify()
        return True

    def _set_aside(self, backend: Backend, standing: Literal["continuing", "parked"]) -> None:
        backend.standing = standing
        if backend.tasks:
            self._cleared[backend.address] = backend
        if standing == "parked" or not backend.tasks:
            self._unwatch(backend)

    def _unwatch(self, backend: Backend) -> None:
        watcher = backend.stop()
        if watcher is not None:
            self._ending.add(watcher)
            watcher.add_done_callback(self._ending.discard)

    # -- what there is --------------------------------------------------------------------------------------------

    def servers(self) -> list[LlmServer]:
        """The registered backends, in order of registration."""
        return [self._describe(backend) for backend in self._open.values()]

    @property
    def calls_in_flight(self) -> int:
        """Model calls that have no answer yet, those on cleared backends included."""
        return self._calls

    def _describe(self, backend: Backend) -> LlmServer:
        return LlmServer(
            address=backend.address,
            policy=self._policy,
            policy_version=backend.policy_version,
            dialect=backend.dialect,
            model=backend.model,
            max_model_len=backend.facts.max_model_len if backend.facts else None,
            healthy=backend.healthy,
            detail=backend.detail,
            in_flight=backend.tasks,
            assigned=backend.assigned,
        )

    # -- tasks ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def session(self, task_key: str, waiting: Waiting) -> AsyncIterator[LlmSession]:
        """One task's way to the policy. Sessions with an equal key share their backend.

        Entering waits for a backend: with the job's timer paused while none is registered (up to `backend.wait_s`),
        with it running while those registered are all unhealthy (up to `backend.unhealthy_wait_s`).

        Raises:
            BackendError: None came, or none got healthy, in time.
        """
        task = self._tasks.setdefault(task_key, Task())
        task.sessions += 1
        try:
            session = PoolSession(self, task, waiting, self._config.unhealthy_wait_s)
            await session.assign()
            yield session
        finally:
            task.sessions -= 1
            if not task.sessions:
                del self._tasks[task_key]
                self._assign(task, None)

    async def first_facts(self, waiting: Waiting) -> BackendFacts:
        """What the first healthy backend is; waits for it as `session` does.

        Raises:
            BackendError: None came, or none got healthy, in time.
        """
        patience = Patience(self._config.unhealthy_wait_s)
        while True:
            for backend in self._open.values():
                if backend.healthy and backend.facts is not None:
                    return backend.facts
            await self._wait(waiting, patience, lambda: False)

    async def backend_for(
        self, task: Task, waiting: Waiting, patience: Patience, avoid: Collection[str] = ()
    ) -> Backend:
        """The task's backend, or another one that takes it over; `avoid` are addresses to try last.

        Raises:
            BackendError: As `session`, `patience` being the bound on unhealthy ones.
        """
        while True:
            backend = self._find(task, avoid)
            if backend is not None:
                self._assign(task, backend)
                return backend
            await self._wait(waiting, patience, lambda: self._find(task, avoid) is not None)

    def has_other(self, avoid: Collection[str]) -> bool:
        """True when a healthy backend is registered under an address that is not in `avoid`."""
        return any(backend.healthy and address not in avoid for address, backend in self._open.items())

    @contextmanager
    def counted_call(self) -> Iterator[None]:
        """Count a call in flight while the block lasts."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def _find(self, task: Task, avoid: Collection[str]) -> Backend | None:
        own = task.backend if task.backend is not None and task.backend.usable else None
        if own is not None and own.address not in avoid:
            return own
        healthy = [backend for backend in self._open.values() if backend.healthy]
        preferred = [backend for backend in healthy if backend.address not in avoid]
        if preferred:
            return choose(self._config.routing, preferred)
        if own is not None:
            return own
        return choose(self._config.routing, healthy) if healthy else None

    def _assign(self, task: Task, backend: Backend | None) -> None:
        before = task.backend
        if before is backend:
            return
        task.backend = backend
        if backend is not None:
            backend.tasks += 1
            backend.assigned += 1
        if before is not None:
            before.tasks -= 1
            if not before.tasks and before.standing != "open" and self._cleared.get(before.address) is before:
                del self._cleared[before.address]
                self._unwatch(before)

    async def _wait(self, waiting: Waiting, patience: Patience, ready: Callable[[], bool]) -> None:
        """Wait until it is worth looking again.

        Raises:
            BackendError: The bound on this kind of wait has passed, or the pool stops.
        """
        if self._stopped:
            raise BackendError("the service stops", retryable=False)
        if not self._open:
            await self._wait_for_add(waiting, ready)
            return
        reasons = "; ".join(f"{backend.address}: {backend.detail}" for backend in self._open.values())
        dead = BackendError(f"no backend of policy {self._policy!r} is healthy: {reasons}", retryable=False)
        patience.check(dead)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience.left_s()):
                await self._changed.wait()

    async def _wait_for_add(self, waiting: Waiting, ready: Callable[[], bool]) -> None:
        wait_s, now = self._config.wait_s, asyncio.get_running_loop().time
        async with waiting(f"for a backend of policy {self._policy!r}"):
            try:
                async with asyncio.timeout(wait_s):
                    while not (self._open or ready() or self._stopped):
                        await self._changed.wait()
            except TimeoutError:
                message = f"no backend was registered for policy {self._policy!r} within {wait_s:g} s"
                raise BackendError(message, retryable=False) from None
            latest = now() + _MAX_SETTLE_S
            while self._open and (left_s := min(self._last_add_s + _SETTLE_S, latest) - now()) > 0:  # noqa: ASYNC110 - a lull
                await asyncio.sleep(left_s)
