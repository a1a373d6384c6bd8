"""Runs handler code so that no way of misbehaving holds its job, or another one, for ever.

The invariant: `HandlerCall.value` returns within the call's time plus the grace, whatever the handler does; the only
exception is code that never yields to the event loop, which nothing can interrupt (see `watchdog`).
"""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prorl_gym.errors import HandlerError, JobError, Stage
from prorl_gym.handlers.base import AgentHandler
from prorl_gym.pipeline.leftovers import Leftovers
from prorl_gym.pipeline.shield import to_the_end
from prorl_gym.pipeline.threads import HandlerThreads

_DEFAULTS = frozenset(function for function in vars(AgentHandler).values() if inspect.isfunction(function))


class OutOfTime(Exception):
    """The call was interrupted by its timer."""


@dataclass(frozen=True, slots=True)
class CallFacilities:
    """What all calls of one pipeline share."""

    threads: HandlerThreads
    leftovers: Leftovers
    grace_s: float


class HandlerCall:
    """One call of one handler method: `async def` in a task of its own, `def` in a thread.

    Args:
        name: Names the code for the watchdog and among the leftovers.
        on_value: Called with what the method returned, also when that comes after everybody has left.
    """

    def __init__(
        self,
        facilities: CallFacilities,
        job_id: str,
        name: str,
        method: Callable[..., Any],
        *arguments: Any,
        on_value: Callable[[Any], None] | None = None,
    ) -> None:
        self._facilities = facilities
        self._job_id = job_id
        self._name = name
        self._method = method
        self._arguments = arguments
        self._on_value = on_value
        self._settled: asyncio.Future[None] | None = None

    async def value(self) -> Any:
        """What the method returned.

        A cancel is passed on to the method, which then has the grace to end.

        Raises:
            OutOfTime: `interrupt` came first; the method was cancelled and has ended, or was abandoned.
            Exception: Whatever the method raised; never CancelledError of its own.
        """
        if is_default(self._method):
            return self._method(*self._arguments)
        loop = asyncio.get_running_loop()
        self._settled = loop.create_future()
        task = loop.create_task(self._invoke(), name=self._name)
        task.add_done_callback(self._ended)
        try:
            await self._settled
        except asyncio.CancelledError:
            await to_the_end(self._end(task))
            raise
        if not task.done():
            await to_the_end(self._end(task))
            raise OutOfTime
        if task.cancelled():
            raise HandlerError("ended with CancelledError although nobody had cancelled the job")
        return task.result()

    def interrupt(self) -> None:
        """Have `value` stop waiting: time is up. Harmless when the call has ended."""
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    async def _invoke(self) -> Any:
        try:
            if inspect.iscoroutinefunction(self._method):
                return await self._method(*self._arguments)
            value = await self._facilities.threads.call(self._method, *self._arguments)
            return await value if inspect.isawaitable(value) else value
        except SystemExit as error:
            raise HandlerError(f"called sys.exit({error.code!r})") from error

    async def _end(self, task: "asyncio.Task[Any]") -> None:
        task.cancel()
        await asyncio.wait([task], timeout=self._facilities.grace_s)
        if not task.done():
            self._facilities.leftovers.abandon_handler(task, self._job_id)
            task.cancel()

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self.interrupt()
        if not task.cancelled() and task.exception() is None and self._on_value is not None:
            self._on_value(task.result())


def is_default(method: Callable[..., Any]) -> bool:
    """True for a method that the handler did not write: AgentHandler's own, which never blocks."""
    return getattr(method, "__func__", None) in _DEFAULTS


def as_job_error(error: Exception, stage: Stage) -> JobError:
    """`error` as it is recorded: itself when it names its boundary already, else a HandlerError.

    A group of one, which a TaskGroup makes of any error, counts as that one.
    """
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, JobError):
        if error.stage is None:
            error.stage = stage
        return error
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a foreign __str__
        text = "(its message cannot be shown)"
    recorded = HandlerError(f"{type(error).__name__}: {text}" if text else type(error).__name__, stage=stage)
    recorded.__cause__ = error
    return recorded
