"""The far end of a grader pool, alone in its sandbox: loads one grader by path and answers a JSON line per request.

Standard library only, started as a file: `grader_worker.py GRADER.py MEMORY_BYTES`. The grader defines
`grade(request: dict) -> dict`. What it prints while loading goes to stderr, later to nowhere; replies have a pipe of
their own.
"""

import ctypes
import importlib.util
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

PR_SET_PDEATHSIG = 1
Grade = Callable[[dict[str, Any]], dict[str, Any]]


def main(grader: Path, memory_bytes: int) -> int:
    """Answer until stdin ends or memory has run out."""
    _die_with_parent()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        grade = _load(grader)
    except Exception as error:  # noqa: BLE001 - the pool says it
        _send(replies, {"error": f"{type(error).__name__}: {error}"})
        return 1
    _send(replies, {"ready": True})
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    for line in sys.stdin.buffer:
        reply: dict[str, Any]
        try:
            reply = {"reply": grade(json.loads(line))}
        except MemoryError:
            _send(replies, {"limit": "memory"})
            return 1
        except Exception as error:  # noqa: BLE001 - the pool turns it into an EvaluationError
            reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
        _send(replies, reply)
    return 0


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)


def _load(path: Path) -> Grade:
    spec = importlib.util.spec_from_file_location("grader", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules["grader"] = module
    spec.loader.exec_module(module)
    grade: Grade = module.grade
    return grade


def _send(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
