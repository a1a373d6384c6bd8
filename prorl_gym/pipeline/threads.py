"""Threads for handler code that is plain `def`.

The invariant: a call that never returns costs its own thread and nothing else. Threads are daemons, so it does not keep
the process alive either; the standard executor would wait for it at exit.
"""

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_Call = tuple["asyncio.Future[Any]", Callable[[], Any]]


class HandlerThreads:
    """Runs calls in threads that are made when needed and kept for the next call. For the event loop's thread.

    Args:
        limit: How many threads there may be at the moment of asking; calls beyond it wait.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._idle: list[SimpleQueue[_Call | None]] = []
        self._queued: deque[_Call] = deque()
        self._running = 0
        self._closed = False

    @property
    def count(self) -> int:
        """Threads, busy and idle."""
        return self._running + len(self._idle)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a call in a thread and wait for its end.

        A thread cannot be interrupted: a cancel is delivered when the call has returned; at once if it has no thread.
        """
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        future: asyncio.Future[Any] = loop.create_future()
        call = (future, lambda: context.run(function, *arguments))
        self._queued.append(call)
        self._dispatch(loop)
        cancelled = False
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                if call in self._queued:
                    self._queued.remove(call)
                    raise
                cancelled = True
        if cancelled:
            future.exception()
            raise asyncio.CancelledError
        return future.result()

    def close(self) -> None:
        """Let idle threads end, and busy ones when their call returns."""
        self._closed = True
        for inbox in self._idle:
            inbox.put(None)
        self._idle.clear()

    def reopen(self) -> None:
        """Keep threads for the next call again."""
        self._closed = False

    def _dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._queued and (self._idle or self.count < self._limit()):
            if self._idle:
                inbox = self._idle.pop()
            else:
                inbox = SimpleQueue()
                threading.Thread(target=self._work, args=(inbox, loop), name="prorl-handler", daemon=True).start()
            self._running += 1
            inbox.put(self._queued.popleft())

    def _work(self, inbox: "SimpleQueue[_Call | None]", loop: asyncio.AbstractEventLoop) -> None:
        while (call := inbox.get()) is not None:
            future, function = call
            value, error = None, None
            try:
                value = function()
            except BaseException as raised:  # noqa: BLE001 - carried to the job that asked
                error = raised
            try:
                loop.call_soon_threadsafe(self._returned, loop, inbox, future, value, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return
            del call, future, function, value, error

    def _returned(
        self,
        loop: asyncio.AbstractEventLoop,
        inbox: "SimpleQueue[_Call | None]",
        future: "asyncio.Future[Any]",
        value: Any,
        error: BaseException | None,
    ) -> None:
        self._running -= 1
        if self._closed:
            inbox.put(None)
        else:
            self._idle.append(inbox)
        if not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(_carried(error))
        self._dispatch(loop)


def _carried(error: BaseException) -> BaseException:
    """`error` as a future can hold it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    carried = RuntimeError(f"{type(error).__name__}: {error}")
    carried.__cause__ = error
    return carried
