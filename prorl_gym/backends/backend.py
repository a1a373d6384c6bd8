"""One registered engine: its registration, its health, the tasks that stay with it and its calls in flight.

Invariant: a call is stamped with the policy version that the address had when the call was sent, and ends in exactly
one way: a generation, an error of the engine, or `CallCut` when the pool took it back.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from prorl_gym.backends.base import BackendFacts, Dialect
from prorl_gym.backends.change import Signal
from prorl_gym.backends.dialects import detect
from prorl_gym.config.models import BackendConfig
from prorl_gym.errors import BackendError
from prorl_gym.tokens.records import GenerateParams, Generation, VersionSpan

_log = logging.getLogger(__name__)

_FIRST_RECHECK_S = 0.1
_FAILURES_TO_TELL = 2
"""A single missed health check of a busy engine moves nobody."""

Standing = Literal["open", "continuing", "parked"]
"""open: takes new tasks. continuing: cleared, its tasks stay to their end. parked: its tasks wait or go elsewhere."""


class CallCut(BackendError):
    """The pool took the call back: cleared with abort, not sent before a park, or its engine was dead for long."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What `add` said about an engine.

    Attributes:
        dialects: To try, in order.
        model: As the caller named it; None takes what the probe finds.
        policy_version: Stamped on calls from now on.
    """

    dialects: list[Dialect]
    model: str | None
    policy_version: int | None


@dataclass(slots=True, eq=False)
class _Call:
    sent: bool = False
    cut: str | None = None
    scope: asyncio.Timeout | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Backend:
    """See the module.

    Attributes:
        standing: See `Standing`.
        healthy: Whether calls are sent there.
        detail: Why it is not healthy, else None.
        facts: What the last probe that succeeded found out.
        tasks: Tasks that stay with it now.
        assigned: Tasks that it got since its registration; a late one starts at the others' minimum.
    """

    def __init__(self, address: str, registration: Registration, config: BackendConfig, changed: Signal) -> None:
        self.address = address
        self.standing: Standing = "open"
        self.healthy = False
        self.detail: str | None = "not probed yet"
        self.facts: BackendFacts | None = None
        self.tasks = 0
        self.assigned = 0
        self._registration = registration
        self._config = config
        self._changed = changed
        self._dialect: Dialect | None = None
        self._calls: set[_Call] = set()
        self._slots = asyncio.Semaphore(config.max_calls_per_backend) if config.max_calls_per_backend else None
        self._checking = asyncio.Lock()
        self._recheck = asyncio.Event()
        self._failures = 0
        self._unhealthy_since = asyncio.get_running_loop().time()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """True when a task that is here may make its next call here."""
        return self.healthy and self.standing != "parked"

    @property
    def dialect(self) -> str | None:
        """Name of the dialect, once the engine answered in it."""
        return self._dialect.name if self._dialect else None

    @property
    def model(self) -> str | None:
        """Model name for calls, as far as known."""
        return self.facts.model if self.facts else self._registration.model

    @property
    def policy_version(self) -> int | None:
        """The version that calls sent now are stamped with."""
        return self._registration.policy_version

    def register(self, registration: Registration) -> None:
        """Take over a new registration of the same address; calls in flight keep the version they were sent under."""
        self._registration = registration
        self.standing = "open"

    # -- calls ----------------------------------------------------------------------------------------------------

    async def generate(self, prompt_ids: Sequence[int], params: GenerateParams) -> Generation:
        """Sample one continuation here, once a call slot is free.

        Raises:
            CallCut: The pool took the call back.
            BackendError: See `Dialect.generate`.
        """
        call = _Call()
        try:
            async with asyncio.timeout(None) as call.scope:
                self._calls.add(call)
                async with self._slot():
                    call.sent = True
                    version = self.policy_version
                    dialect, model = self._dialect, self.model
                    if dialect is None or model is None:
                        raise BackendError(f"{self.address} was never probed with success")
                    generation = await dialect.generate(prompt_ids, params, model=model)
        except TimeoutError:
            raise CallCut(call.cut or "cut") from None
        finally:
            self._calls.discard(call)
            call.ended.set()
        if generation.versions or not generation.output_ids:
            return generation
        return replace(generation, versions=(VersionSpan(0, len(generation.output_ids), version),))

    def _slot(self) -> contextlib.AbstractAsyncContextManager[None]:
        return _held(self._slots) if self._slots else contextlib.nullcontext()

    def cut(self, reason: str, *, sent: bool = True) -> None:
        """Take calls back: all, or with `sent=False` only those that wait for a slot."""
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            if call.cut is None and call.scope is not None and (sent or not call.sent):
                call.cut = reason
                call.scope.reschedule(now)

    async def drained(self) -> None:
        """Wait until the calls in flight at this moment have ended; each has its own deadline."""
        for call in list(self._calls):
            await call.ended.wait()

    # -- health ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch the engine's health; harmless when it is watched already."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(), name=f"health of {self.address}")

    def stop(self) -> asyncio.Task[None] | None:
        """End watching; the task returned, if any, is for the caller to await."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
        return watcher

    def failed(self, detail: str, *, unreachable: bool) -> None:
        """Take note of a failed call: look again at once, and send no more where no connection comes about."""
        if unreachable:
            self._set_health(detail)
        self._recheck.set()

    async def check(self, *, probe: bool = False) -> None:
        """Look at the engine now; `probe` asks again what it is, and believes a single failure."""
        async with self._checking:
            detail: str | None = None
            try:
                if probe or not self.healthy:
                    self._dialect, self.facts = await detect(self._registration.dialects)
                if self._dialect is None or not await self._dialect.healthy():
                    detail = "it does not answer its health check"
            except BackendError as error:
                detail = str(error)
            except Exception as error:  # noqa: BLE001 - a dialect's fault must not end the watch
                _log.exception("the probe of %s broke", self.address)
                detail = f"{type(error).__name__}: {error}"
            self._failures = self._failures + 1 if detail else 0
            if detail is None or probe or self._failures >= _FAILURES_TO_TELL:
                self._set_health(detail)

    def _set_health(self, detail: str | None) -> None:
        was, self.healthy, self.detail = self.healthy, detail is None, detail
        if was and detail is not None:
            self._unhealthy_since = asyncio.get_running_loop().time()
            _log.warning("backend %s is unhealthy: %s", self.address, detail)
        elif not was and detail is None:
            _log.info("backend %s is healthy and serves %s", self.address, self.model)
        if was is not self.healthy:
            self._changed.notify()

    async def _watch(self) -> None:
        pause_s = self._config.health_interval_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._recheck.wait()
                    await asyncio.sleep(_FIRST_RECHECK_S)  # one check for a burst of failed calls
            self._recheck.clear()
            await self.check()
            if self._failures == 0:
                pause_s = self._config.health_interval_s
                continue
            pause_s = _FIRST_RECHECK_S if self._failures == 1 else min(2 * pause_s, self._config.health_interval_s)
            dead_s = asyncio.get_running_loop().time() - self._unhealthy_since
            if not self.healthy and dead_s > self._config.unhealthy_wait_s:
                self.cut(f"the engine gives no sign of life since {dead_s:.0f} s: {self.detail}")


@contextlib.asynccontextmanager
async def _held(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    async with slots:
        yield
