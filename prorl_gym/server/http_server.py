"""uvicorn on a socket of ours, within an event loop of ours."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from prorl_gym.server.app import create_app
from prorl_gym.server.listener import address_of
from prorl_gym.server.service import Service

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections: the side that sends next should be the one that closes."""


class _Uvicorn(uvicorn.Server):
    """Without its own signal handlers, and with events where it has flags that it polls."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.leaving = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves a service over HTTP. Starting and stopping the service is the caller's.

    Attributes:
        address: `http://HOST:PORT`.
    """

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self.address = address_of(listener)
        self._listener = listener
        self._uvicorn = _Uvicorn(_config(service))
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; returns once connections are taken."""
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._listener]), name="http server")
        listening = asyncio.create_task(self._uvicorn.listening.wait())
        await asyncio.wait((listening, self._serving), return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()

    async def closed(self) -> None:
        """Wait until nothing is served any more."""
        if self._serving is not None:
            await asyncio.wait((self._serving,))

    async def stop(self, *, grace_s: float = 2.0, force: bool = False) -> None:
        """Stop listening and let answers go out; those that take longer are cut. Idempotent.

        Args:
            grace_s: For clients to take their last answer.
            force: Cut them at once.
        """
        self._uvicorn.should_exit = True
        self._uvicorn.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._uvicorn.leaving.set()
        self._uvicorn.force_exit = force
        await self.closed()
        for connection in list(self._uvicorn.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def _config(service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(service),
        http="httptools",
        loop="none",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=service.config.server.access_log,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=4096,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
