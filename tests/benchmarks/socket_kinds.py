"""Round trips of tool server frames over a Unix socket and over TCP loopback, taken in turns."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from prorl_gym.runtimes.channel import ToolChannel
from prorl_gym.toolserver.frames import FrameBuffer, pack

WARM_UP = 20


def _echo(unix: str, port: Any) -> None:
    """Serve one connection of each kind until both are closed: the same answer to each frame."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameBuffer()
        while chunk := await reader.read(1 << 18):
            for header, body in frames.feed(chunk):
                writer.write(pack({"id": header["id"], "ok": True}, body))
                await writer.drain()
        writer.close()
        left.release()

    left = asyncio.Semaphore(0)

    async def run() -> None:
        tcp = await asyncio.start_server(serve, "127.0.0.1", 0)
        local = await asyncio.start_unix_server(serve, unix)
        port.put(tcp.sockets[0].getsockname()[1])
        async with tcp, local:
            await left.acquire()
            await left.acquire()

    asyncio.run(run())


async def round_trips(size: int, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of each round trip with a body of that size: Unix, TCP."""
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        unix_path = str(Path(folder) / "echo")
        server = context.Process(target=_echo, args=(unix_path, port), daemon=True)
        server.start()
        address = ("127.0.0.1", await asyncio.to_thread(port.get, timeout=30))
        unix = socket.socket(socket.AF_UNIX)
        unix.connect(unix_path)
        tcp = socket.create_connection(address)
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tcp.setblocking(False)
        _, over_tcp = await asyncio.get_running_loop().create_connection(ToolChannel, sock=tcp)
        channels = [await ToolChannel.connect(unix), over_tcp]
        body = b"x" * size
        took: tuple[list[float], list[float]] = ([], [])
        for number in range(WARM_UP + repeats):
            for channel, samples in zip(channels, took, strict=True):
                started = time.perf_counter()
                await channel.request({"op": "echo"}, body, within_s=30)
                if number >= WARM_UP:
                    samples.append(time.perf_counter() - started)
        for channel in channels:
            channel.close("measured")
        await asyncio.to_thread(server.join, 10)
    return took
