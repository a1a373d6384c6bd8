"""The life of the server process: bind, load, serve, and end in under two seconds whatever the model is doing.

torch is imported once the address is ours and the parent is watched: it takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from aiohttp import web

from prorl_gym.embedded import model_prep
from prorl_gym.errors import ConfigError

if TYPE_CHECKING:
    from prorl_gym.embedded.engine import Engine

log = logging.getLogger(__name__)

#: A step of a large model may take longer than we may; then the process ends in the middle of it.
ENGINE_STOP_S = 1.0
#: For replies that are being written when the server stops.
HTTP_STOP_S = 0.3


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the command line says; its help describes each."""

    model: str
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    address_file: Path | None = None
    watch_fd: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    threads: int | None = None


def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM, SIGINT, or the end of the watched descriptor; then the process ends with code 0.

    Raises:
        ConfigError: The address is taken, or the model cannot be served.
    """
    if options.watch_fd is not None:
        _watch(options.watch_fd)
    with _bind(options.host, options.port) as listener:
        folder = str(model_prep.prepare(options.model))
        _load_and_serve(options, folder, listener)


def _load_and_serve(options: ServeOptions, folder: str, listener: socket.socket) -> None:
    import torch

    from prorl_gym.embedded.api import Api
    from prorl_gym.embedded.engine import Engine
    from prorl_gym.embedded.metrics import Metrics
    from prorl_gym.embedded.model import load

    # One core stays free for HTTP and whatever shares the machine: a small model is no slower for it (2 cores: 52 ms a
    # step against 58), and threads that wait for a core make it many times slower.
    torch.set_num_threads(options.threads or max(len(os.sched_getaffinity(0)) - 1, 1))
    loaded = load(folder, dtype=options.dtype, device=options.device, max_model_len=options.max_model_len)
    name = options.served_model_name or folder
    metrics = Metrics(name)
    engine = Engine(loaded, max_batch=options.max_num_seqs, metrics=metrics)
    api = Api(engine, loaded, metrics, model=name)
    engine.start()
    asyncio.run(_serve(api.application(), engine, listener, options.address_file))


async def _serve(app: web.Application, engine: Engine, listener: socket.socket, address_file: Path | None) -> NoReturn:
    """Serve until a signal, then answer calls in flight with 503 and end the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=HTTP_STOP_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=1024).start()
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        log.info("serving at %s", address)
        if address_file is not None:
            _write_whole(address_file, address)
        await stop.wait()
        log.info("stopping")
        if not await asyncio.to_thread(engine.stop, ENGINE_STOP_S):
            log.warning("the engine is still in a step: leaving without it")
    finally:
        await runner.cleanup()
    # Taking torch down in order takes longer than all of this, and a thread may be in a step or reading a checkpoint.
    logging.shutdown()
    os._exit(0)


def _bind(host: str, port: int) -> socket.socket:
    """Take the address at once; connections are refused until the model is there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}") from error
    return listener


def _watch(descriptor: int) -> None:
    """End this process as SIGTERM does once nobody holds the other end of `descriptor`."""
    try:
        os.fstat(descriptor)
    except OSError as error:
        raise ConfigError(f"--watch-fd {descriptor}: {error.strerror}; it must be inherited (pass_fds)") from error
    os.set_inheritable(descriptor, False)

    def wait() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        with contextlib.suppress(OSError):
            while poll.poll() and os.read(descriptor, 4096):
                pass
        # Before the loop runs, while the model is loading, this ends the process at once.
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="watch-fd", daemon=True).start()


def _write_whole(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        file.write(text)
    Path(file.name).rename(path)
