"""An IPython kernel behind Jupyter Kernel Gateway: `kernel_gateway.py plain|quick`; quick acknowledges at once."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
import uuid

import websocket
from channel import serve

QUICK = sys.argv[1] == "quick"
START_TIMEOUT_S = 60


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(url: str, token: str) -> dict:
    """POST without a body, tried until the gateway listens."""
    request = urllib.request.Request(url, data=b"{}", headers={"Authorization": f"token {token}"})
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


class Kernel:
    """One kernel's websocket."""

    def __init__(self, port: int, token: str) -> None:
        kernel = post(f"http://127.0.0.1:{port}/api/kernels", token)["id"]
        self.socket = websocket.create_connection(
            f"ws://127.0.0.1:{port}/api/kernels/{kernel}/channels",
            header=[f"Authorization: token {token}"],
            timeout=30,
            skip_utf8_validation=True,
        )

    def _receive(self) -> dict:
        if QUICK:  # not sticky: the kernel takes it back
            self.socket.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return json.loads(self.socket.recv())

    def run(self, code: str) -> str:
        """Run one cell, until reply and idle are both seen."""
        number = uuid.uuid4().hex
        header = {"msg_id": number, "msg_type": "execute_request", "username": "", "session": "bench", "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        self.socket.send(json.dumps(message))
        replied = idle = False
        printed = []
        while not (replied and idle):
            got = self._receive()
            if got["parent_header"].get("msg_id") != number:
                continue
            kind, content = got["msg_type"], got["content"]
            replied |= kind == "execute_reply"
            idle |= kind == "status" and content["execution_state"] == "idle"
            if kind in ("stream", "execute_result"):
                printed.append(content.get("text") or content["data"]["text/plain"])
        return "".join(printed)


port, token = free_port(), secrets.token_hex(16)
command = [sys.executable, "-m", "kernel_gateway", "--KernelGatewayApp.ip=127.0.0.1", f"--KernelGatewayApp.port={port}"]
with subprocess.Popen(
    command, env={**os.environ, "KG_AUTH_TOKEN": token}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
) as gateway:
    try:
        serve(Kernel(port, token).run)
    finally:
        gateway.terminate()
