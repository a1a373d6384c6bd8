"""One policy: its backends and the renderer proven for its model."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from prorl_gym.backends.base import LlmSession, Waiting
from prorl_gym.backends.pool import BackendPool
from prorl_gym.config.models import PolicyConfig
from prorl_gym.daemon_thread import in_daemon_thread
from prorl_gym.errors import BackendError, ConfigError
from prorl_gym.tokens.base import ChatRenderer
from prorl_gym.tokens.loading import load_renderer

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 600.0
"""A tokenizer may have to be downloaded."""

Load = Callable[[PolicyConfig, str], ChatRenderer]
Registered = tuple[tuple[str, str | None, int | None], ...]


class Policy:
    """Lends episodes a session with its backends and its renderer. Used on the event loop only."""

    def __init__(self, name: str, config: PolicyConfig, pool: BackendPool, *, load: Load = load_renderer) -> None:
        self.name = name
        self.config = config
        self.pool = pool
        self._load = load
        self._loading: dict[str, asyncio.Task[ChatRenderer]] = {}
        self._refused: dict[str, tuple[Registered, str]] = {}
        self._preloading: asyncio.Task[None] | None = None

    def session(self, task_key: str, waiting: Waiting) -> AbstractAsyncContextManager[LlmSession]:
        """One job's way to the backends; see `BackendPool.session`."""
        return self.pool.session(task_key, waiting)

    async def renderer(self, waiting: Waiting) -> ChatRenderer:
        """The renderer of the policy's model: loaded once, in a thread, however many jobs ask.

        With `policy.model=auto` the model is what the first healthy backend says it serves, and the job's timer rests
        until there is one. A refusal stands until other backends are registered. Cancelling leaves the load to others.

        Raises:
            BackendError: No backend came, it does not tell its model, or the model's template cannot be proven.
        """
        model = self.config.model
        if model == "auto":
            model = (await self.pool.first_facts(waiting)).model or ""
        refusal = self._refused.get(model)
        if refusal is not None:
            if refusal[0] == self._registered():
                raise BackendError(refusal[1], retryable=False)
            del self._refused[model], self._loading[model]
        task = self._loading.get(model)
        if task is None:
            task = self._loading[model] = asyncio.create_task(self._load_in_thread(model))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        if task.done():
            return task.result()
        async with waiting("for the policy's renderer"):
            return await asyncio.shield(task)

    def preload(self) -> None:
        """Load the renderer in the background, so that the first job finds it; a second call is harmless.

        With `policy.model=auto` that begins when a registered backend is healthy.
        """
        if self._preloading is None or self._preloading.done():
            self._preloading = asyncio.create_task(self._preload(), name=f"renderer of policy {self.name}")

    @property
    def refusal(self) -> str | None:
        """Why jobs are refused while the backends stay those that are registered; None when they are not."""
        registered = self._registered()
        return next((message for known, message in self._refused.values() if known == registered), None)

    async def stop(self) -> None:
        """End what is loading; idempotent. A thread that is at it is left to itself."""
        tasks = [*self._loading.values(), *filter(None, [self._preloading])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _preload(self) -> None:
        try:
            if self.config.model == "auto":
                await self._first_healthy()
            await self.renderer(_unhurried)
        except BackendError:
            return  # a refusal has been logged; with no backend left there is nothing to load
        except Exception:
            log.exception("the renderer of policy %r could not be loaded", self.name)

    async def _first_healthy(self) -> None:
        """Wait for it as long as any backend is registered: an engine may take minutes to come up.

        Raises:
            BackendError: None is registered any more.
        """
        while True:
            try:
                await self.pool.first_facts(_unhurried)
            except BackendError:
                if not self.pool.servers():
                    raise
            else:
                return

    async def _load_in_thread(self, model: str) -> ChatRenderer:
        registered = self._registered()
        try:
            if not model:
                raise ConfigError("the backend does not say which model it serves; set policy.model")
            began = time.monotonic()
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                renderer = await in_daemon_thread(self._load, self.config, model)
            seconds = time.monotonic() - began
            log.info("policy %r: the renderer of model %r is ready after %.1f s", self.name, model, seconds)
            return renderer
        except (ConfigError, TimeoutError) as error:
            reason = str(error) or f"its tokenizer did not load within {LOAD_TIMEOUT_S:g} s"
            message = f"policy {self.name!r}: model {model!r} is refused: {reason}"
            self._refused[model] = (registered, message)
            log.error("%s", message)
            raise BackendError(message, retryable=False) from error
        except BaseException:
            self._loading.pop(model, None)
            raise

    def _registered(self) -> Registered:
        return tuple((server.address, server.model, server.policy_version) for server in self.pool.servers())


@contextlib.asynccontextmanager
async def _unhurried(reason: str) -> AsyncIterator[None]:
    """The `waiting` of nobody's job."""
    yield
