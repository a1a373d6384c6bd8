"""The process that forks sandboxes, and what it does when the service dies on it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from prorl_gym.runtimes import spawner


def test_a_service_that_dies_with_replies_unread_leaves_no_process(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", spawner.__file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
        theirs.close()
        wish = {"id": 1, "argv": ["/bin/sleep", "600"], "env": {}, "cwd": "/", "uid": None, "cgroups": [], "binds": {}}
        for _ in range(2):
            socket.send_fds(ours, [json.dumps(wish).encode()], [log.fileno()])
        pid = json.loads(ours.recv(4096))["pid"]
        assert ours.recv(1, socket.MSG_PEEK)
    _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, b"")
    assert not os.path.exists(f"/proc/{pid}")
