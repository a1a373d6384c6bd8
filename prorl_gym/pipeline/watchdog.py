"""Says who holds the event loop.

A handler's `async def` that computes or sleeps without ever awaiting stops every other job. It cannot be interrupted
from outside; what can be done is to name it while it happens.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback

logger = logging.getLogger("prorl_gym.pipeline")


class Watchdog:
    """A thread that asks the loop for a sign of life and logs whose code it is stuck in.

    Args:
        limit_s: Silence that is worth a warning; one blockage is named once, and again each time it has grown tenfold.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit = limit_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._ended = threading.Event()
        self._alive = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch the running loop, whose thread this is called in."""
        if self._thread is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._ended.clear()
        self._thread = threading.Thread(target=self._watch, name="prorl-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; idempotent."""
        if self._thread is not None:
            self._ended.set()
            self._alive.set()
            self._thread.join(timeout=1.0)
            self._thread = None

    def _watch(self) -> None:
        assert self._loop is not None  # noqa: S101 - set before the thread starts
        while not self._ended.wait(self._limit / 2):
            self._alive.clear()
            asked = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._alive.set)
            except RuntimeError:  # closed
                return
            patience = self._limit
            while not self._alive.wait(patience) and not self._ended.is_set():
                self._name_it(time.monotonic() - asked)
                patience *= 10

    def _name_it(self, silent_s: float) -> None:
        try:
            task = asyncio.current_task(self._loop)
        except RuntimeError:
            task = None
        who = "code outside any task" if task is None else task.get_name()
        frame = sys._current_frames().get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)[-6:]) if frame is not None else ""
        logger.warning(
            "%s has held the event loop for %.1f s; every other job waits. Blocking work belongs into a plain `def` "
            "method or a thread. It is here:\n%s",
            who,
            silent_s,
            stack,
            extra={"blocked_by": who},
        )
