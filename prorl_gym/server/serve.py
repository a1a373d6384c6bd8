"""The service as a process: comes up, says where it is, goes down in order and in time.

The invariant: from the first SIGTERM, SIGINT or `/stop` with exit the process is gone within `server.shutdown_s`, with
every waiter answered; when the event loop itself is stuck, a thread ends the process, and the sandboxes with it.
"""

import asyncio
import contextlib
import gc
import logging
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from prorl_gym.config.models import ProrlConfig
from prorl_gym.server.http_server import HttpServer
from prorl_gym.server.listener import bind, published
from prorl_gym.server.service import Service

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
FORCED_S = 3.0
"""From the second signal to the end of the process."""
HTTP_SHARE = 0.2
"""Of `server.shutdown_s`: for clients to take their last answer, where the jobs' end left as much."""


def serve(config: ProrlConfig) -> int:
    """Serve until a signal or `/stop` with exit; blocking.

    Returns:
        0 when everything was ended in order, 1 when something had to be left or cut short.

    Raises:
        ConfigError: It cannot come up like this; says what helps.
    """
    raise_file_limit()
    spare_the_collector()
    watchdog = _Watchdog()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            clean = runner.run(_Process(config, watchdog).run())
    finally:
        watchdog.disarm()
    return 0 if clean else 1


def raise_file_limit() -> None:
    """Allow as many open files as this user may: a job may hold several sockets."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def spare_the_collector() -> None:
    """Let the garbage collector look less often: thousands of kept results are no garbage, and are looked at each time.

    Measured with 512 jobs under way: 40 % more jobs a second. What is loaded by now is left out for good.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


class _Watchdog:
    """Ends the process, from a thread of its own, when the time is over."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None
        self._due = math.inf

    @property
    def left_s(self) -> float:
        """Seconds until then; infinite where nothing was said."""
        return self._due - time.monotonic()

    def arm(self, after_s: float) -> None:
        """End the process in so many seconds, or earlier where that was said before."""
        due = time.monotonic() + after_s
        if due >= self._due:
            return
        self.disarm()
        self._due = due
        self._timer = threading.Timer(after_s, _give_up)
        self._timer.daemon = True
        self._timer.start()

    def disarm(self) -> None:
        """Let the process live."""
        if self._timer is not None:
            self._timer.cancel()
        self._due = math.inf


class _Process:
    def __init__(self, config: ProrlConfig, watchdog: _Watchdog) -> None:
        self._config = config
        self._watchdog = watchdog
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()

    async def run(self) -> bool:
        """The whole life; True when it ended in order."""
        service = Service(self._config)
        listener = bind(self._config.server, has_token=service.token is not None)
        with contextlib.closing(listener), self._handling_signals():
            try:
                if not await self._unless_signalled(asyncio.create_task(service.start())):
                    return True
                return await self._serve(service, HttpServer(service, listener))
            finally:
                self._watchdog.arm(self._config.server.shutdown_s)
                if not self._forced.is_set():
                    await service.stop()

    async def _serve(self, service: Service, http: HttpServer) -> bool:
        await http.start()
        try:
            with published(http.address, self._config.server.address_file):
                _announce(http.address)
                drain_s = await self._until_asked(service, http)
                if drain_s != 0.0:
                    log.info("draining")
                    stopping = asyncio.create_task(service.pipeline.stop(drain=True, deadline_s=drain_s))
                    await self._unless_signalled(stopping)
                clean = await self._shut_down(service)
        finally:
            grace_s = min(HTTP_SHARE * self._config.server.shutdown_s, self._watchdog.left_s - 0.5)
            await http.stop(grace_s=grace_s, force=self._forced.is_set())
        return clean

    async def _until_asked(self, service: Service, http: HttpServer) -> float | None:
        """Wait until somebody wants the end; gives how long jobs may take to end by themselves."""
        asked = asyncio.create_task(service.exit_requested())
        closed = asyncio.create_task(http.closed())
        try:
            await self._signalled_or(asked, closed)
            return asked.result() if asked.done() else 0.0
        finally:
            asked.cancel()
            closed.cancel()

    async def _shut_down(self, service: Service) -> bool:
        """End jobs, sandboxes and every other part, while HTTP still answers."""
        log.info("stopping")
        self._watchdog.arm(self._config.server.shutdown_s)
        stopping = asyncio.create_task(service.stop())
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait((stopping, forced), return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if stopping.done():
            stopping.result()
            return not service.leftovers()
        log.warning("cutting the stop short")
        stopping.cancel()
        await asyncio.wait((stopping,), timeout=1.0)
        return False

    async def _unless_signalled(self, task: "asyncio.Task[None]") -> bool:
        """Wait for `task` to succeed; a signal cancels it and gives False."""
        await self._signalled_or(task)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if task.cancelled():
            return False
        task.result()
        return True

    async def _signalled_or(self, *tasks: "asyncio.Task[Any]") -> None:
        signalled = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((signalled, *tasks), return_when=asyncio.FIRST_COMPLETED)
        finally:
            signalled.cancel()

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """The first signal stops in order, the second cuts short.

        Plain handlers, not the loop's: they run also while a handler's code holds the event loop.
        """
        loop = asyncio.get_running_loop()
        steps = [(self._stop, self._config.server.shutdown_s), (self._forced, FORCED_S)]

        def on_signal(signum: int, frame: FrameType | None) -> None:
            event, limit_s = steps.pop(0) if len(steps) > 1 else steps[0]
            self._watchdog.arm(limit_s)
            loop.call_soon_threadsafe(event.set)

        before = {signum: signal.signal(signum, on_signal) for signum in SIGNALS}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


def _announce(address: str) -> None:
    """The first line of stdout is the address, for scripts; the log says it to people."""
    with contextlib.suppress(OSError):
        sys.stdout.write(address + "\n")
        sys.stdout.flush()
    log.info("serving on %s, documentation on %s/docs", address, address)


def _give_up() -> None:
    """End the process, also when whoever reads its log is as stuck as it is."""
    speaking = threading.Thread(target=log.error, args=("could not stop in time: ending as it is",), daemon=True)
    speaking.start()
    speaking.join(0.5)
    os._exit(1)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
