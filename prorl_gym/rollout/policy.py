"""One policy: its backends and the renderer proven for its model."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from prorl_gym.backends.base import LlmSession, Waiting
from prorl_gym.backends.pool import BackendPool
from prorl_gym.config.models import PolicyConfig
from prorl_gym.errors import BackendError, ConfigError
from prorl_gym.tokens.base import ChatRenderer
from prorl_gym.tokens.loading import load_renderer

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
            if not model:
                raise BackendError(
                    f"policy {self.name!r}: the backend does not say which model it serves; set policy.model",
                    retryable=False,
                )
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

    async def _load_in_thread(self, model: str) -> ChatRenderer:
        registered = self._registered()
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                return await asyncio.to_thread(self._load, self.config, model)
        except (ConfigError, TimeoutError) as error:
            reason = str(error) or f"its tokenizer did not load within {LOAD_TIMEOUT_S:g} s"
            message = f"policy {self.name!r}: model {model!r} is refused: {reason}"
            self._refused[model] = (registered, message)
            raise BackendError(message, retryable=False) from error
        except BaseException:
            self._loading.pop(model, None)
            raise

    def _registered(self) -> Registered:
        return tuple((server.address, server.model, server.policy_version) for server in self.pool.servers())
