"""The service as a process: comes up, says where it is, goes down in order and in time.

The invariant: from the first SIGTERM, SIGINT or `/stop` with exit the process is gone within `server.shutdown_s`, with
every waiter answered; when the event loop itself is stuck, a thread ends the process, and the sandboxes with it.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from prorl_gym.config.models import ProrlConfig
from prorl_gym.server.app import create_app
from prorl_gym.server.listener import address_of, bind, published
from prorl_gym.server.service import Service

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
HTTP_GRACE_S = 2
"""For connections to take their last answer, once no job is left."""
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections: the side that sends next should be the one that closes."""


def serve(config: ProrlConfig) -> int:
    """Serve until a signal or `/stop` with exit; blocking.

    Returns:
        0 when everything was ended in order, 1 when something had to be left or cut short.

    Raises:
        ConfigError: It cannot come up like this; says what helps.
    """
    raise_file_limit()
    process = _Process(config)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        clean = runner.run(process.run())
    process.watchdog.cancel()
    return 0 if clean else 1


def raise_file_limit() -> None:
    """Allow as many open files as this user may: a job may hold several sockets."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Process:
    def __init__(self, config: ProrlConfig) -> None:
        self._config = config
        self.watchdog = threading.Timer(config.server.shutdown_s, _give_up)
        self.watchdog.daemon = True
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()

    async def run(self) -> bool:
        """The whole life; True when it ended in order."""
        service = Service(self._config)
        listener = bind(self._config.server, has_token=service.token is not None)
        with contextlib.closing(listener), self._handling_signals():
            starting = asyncio.create_task(service.start())
            if not await self._unless_stopped(starting):
                self._arm_watchdog()
                await service.stop()
                return True
            return await self._serve(service, listener)

    async def _serve(self, service: Service, listener: socket.socket) -> bool:
        server = _Server(self._uvicorn_config(service))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        asked = asyncio.create_task(service.exit_requested())
        address = address_of(listener)
        while not (server.started or serving.done()):
            await asyncio.sleep(0.001)  # noqa: ASYNC110 - uvicorn offers a flag, no event; it takes a few of these
        try:
            with published(address, self._config.server.address_file):
                _announce(address)
                await self._first_of(asked, serving)
                clean = await self._shut_down(service, asked)
                server.should_exit = True
                server.force_exit = self._forced.is_set()
                await asyncio.wait((serving,))
                return clean and not self._forced.is_set()
        finally:
            asked.cancel()
            await service.stop()

    async def _shut_down(self, service: Service, asked: "asyncio.Task[float | None]") -> bool:
        """End jobs, sandboxes and every other part, while HTTP still answers."""
        if not self._stop.is_set() and asked.done() and asked.result() != 0.0:
            log.info("draining")
            drain = asyncio.create_task(service.pipeline.stop(drain=True, deadline_s=asked.result()))
            await self._unless_stopped(drain)
        log.info("stopping")
        self._arm_watchdog()
        stopping = asyncio.create_task(service.stop())
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait((stopping, forced), return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if not stopping.done():
            stopping.cancel()
            await asyncio.wait((stopping,), timeout=1.0)
            return False
        stopping.result()
        return not service.leftovers()

    async def _unless_stopped(self, task: "asyncio.Task[None]") -> bool:
        """Wait for `task` to succeed; a signal cancels it and gives False."""
        await self._first_of(task)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if task.cancelled():
            return False
        task.result()
        return True

    async def _first_of(self, *tasks: "asyncio.Task[object]") -> None:
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
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def on_signal(signum: int, frame: FrameType | None) -> None:
            event = self._forced if self.watchdog.is_alive() else self._stop
            self._arm_watchdog()
            loop.call_soon_threadsafe(event.set)

        before = {signum: signal.signal(signum, on_signal) for signum in SIGNALS}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _arm_watchdog(self) -> None:
        if not self.watchdog.is_alive():
            self.watchdog.start()

    def _uvicorn_config(self, service: Service) -> uvicorn.Config:
        return uvicorn.Config(
            create_app(service),
            http="httptools",
            loop="none",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=self._config.server.access_log,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=4096,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=HTTP_GRACE_S,
        )


def _announce(address: str) -> None:
    """The first line of stdout is the address, for scripts; the log says it to people."""
    with contextlib.suppress(OSError):
        sys.stdout.write(address + "\n")
        sys.stdout.flush()
    log.info("serving on %s, documentation on %s/docs", address, address)


def _give_up() -> None:
    log.error("could not stop in time: ending the process as it is")
    logging.shutdown()
    os._exit(1)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
