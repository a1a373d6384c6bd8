"""How fast sandboxes start and tools answer here: figures, which nothing is promised of."""

import asyncio
import time
from statistics import median
from typing import Any

from prorl_gym.config.models import usable_cpus
from prorl_gym.doctor.finding import Finding, failed, ok
from prorl_gym.doctor.subject import Neighbours, Subject

_STARTS = 5
_RATE_S = 2.0
_CALLS = 30
_CALL_S = 10.0


async def start_latency(subject: Subject) -> Finding:
    """From nothing to the first answer of the tool server, one sandbox after the other."""
    took_s = []
    for _ in range(_STARTS):
        sandbox = subject.sandbox()
        began = time.monotonic()
        async with sandbox:
            took_s.append(time.monotonic() - began)
    start_ms = median(took_s) * 1000
    return ok("start latency", f"{start_ms:.0f} ms, median of {_STARTS}", start_ms=round(start_ms, 1))


async def start_rate(subject: Subject) -> Finding:
    """Sandboxes started and stopped per minute, two at a time for each CPU."""
    at_once = 2 * usable_cpus()
    began = time.monotonic()
    done = 0

    async def keep_going() -> None:
        nonlocal done
        while time.monotonic() - began < _RATE_S:
            async with subject.sandbox():
                pass
            done += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(keep_going())
    per_minute = done / (time.monotonic() - began) * 60
    words = f"{per_minute:.0f} per minute started and stopped, {at_once} at once on {usable_cpus()} CPUs"
    return ok("sandboxes per minute", words, per_minute=round(per_minute))


async def tool_latency(pair: Neighbours) -> Finding:
    """A call of each tool, host to sandbox to host."""
    name = "tool latency"
    calls: dict[str, dict[str, Any]] = {
        "bash": {"command": "echo hi"},
        "ipython": {"code": "1 + 1"},
        "file_editor": {"command": "view", "path": "doctor.txt"},
    }
    await pair.first.copy_in(b"one\ntwo\n", "doctor.txt")
    medians: dict[str, float] = {}
    for tool, arguments in calls.items():
        took_s = []
        for _ in range(_CALLS):
            began = time.monotonic()
            reply = await pair.first.call(tool, arguments, timeout_s=_CALL_S)
            took_s.append(time.monotonic() - began)
            if reply.error:
                return failed(name, f"{tool} does not work: {reply.text.strip()[:300]}", "see the image's own programs")
        medians[tool] = median(took_s) * 1000
    words = ", ".join(f"{tool} {ms:.2f} ms" for tool, ms in medians.items())
    return ok(name, f"{words}, medians of {_CALLS}", **{f"{tool}_ms": round(ms, 3) for tool, ms in medians.items()})
