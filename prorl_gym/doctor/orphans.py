"""Nothing outlives a service that is killed in the middle of jobs.

The processes are those that the kernel lists below a child of ours, each with its start time; no name is looked for.
"""

import asyncio
import dataclasses
import json
import sys
import time

from prorl_gym.doctor.doomed import LEFT
from prorl_gym.doctor.finding import Finding, failed, ok
from prorl_gym.doctor.subject import Subject
from prorl_gym.errors import SandboxError
from prorl_gym.runtimes.host import runs
from prorl_gym.runtimes.spawner import start_time_of
from prorl_gym.toolserver.children import descendants

_SANDBOXES = 2
_READY_S = 40.0
_GONE_S = 5.0
_LOOK_AGAIN_S = 0.02
_REASON_BYTES = 2000

Process = tuple[int, int | None]


async def nothing_outlives_a_kill(subject: Subject) -> Finding:
    """A child service with sandboxes is killed; every process below it ends, and its folders and records go."""
    name = "orphans after a kill"
    order = {
        "runtime": subject.config.runtime.model_dump(mode="json"),
        "paths": subject.config.paths.model_dump(mode="json"),
        "spec": dataclasses.asdict(subject.spec),
        "sandboxes": _SANDBOXES,
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prorl_gym.doctor.doomed",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        below = await _ready(child, order)
        killed = time.monotonic()
        child.kill()
        await child.wait()
        left = await _wait_for_end(below)
        took_s = time.monotonic() - killed
        swept = await subject.factory.sweep()
        if left:
            left = await _wait_for_end(left)
    finally:
        await _end(child)
        await subject.factory.sweep()  # of a child that was not waited for: this check was cut short
    if left:
        pids = ", ".join(str(pid) for pid, _ in left)
        return failed(
            name, f"{len(left)} of {len(below)} processes live on: {pids}",
            f"end them (kill -9 {pids}) and report it: the kernel ends neither PID namespaces nor orphans as it should",
        )  # fmt: skip
    if leftovers := subject.factory.leftovers():
        return failed(name, f"folders stay: {leftovers[0]['reason']}", f"remove {leftovers[0]['folder']} by hand")
    words = f"all {len(below)} processes of {_SANDBOXES} sandboxes ended {took_s:.2f} s after SIGKILL of their service"
    return ok(name, f"{words}; {swept} folders swept", processes=len(below), ended_s=round(took_s, 2))


async def _ready(child: asyncio.subprocess.Process, order: dict[str, object]) -> list[Process]:
    """What runs below the child once its sandboxes do.

    Raises:
        SandboxError: They did not come up, or too little of them is seen.
    """
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None  # noqa: S101
    child.stdin.write(json.dumps(order).encode() + b"\n")
    await child.stdin.drain()
    async with asyncio.timeout(_READY_S):
        if not await child.stdout.readline():
            why = (await child.stderr.read())[-_REASON_BYTES:].decode(errors="replace").strip()
            raise SandboxError(f"the child service ended: {why.splitlines()[-1] if why else 'it said nothing'}")
    below = [(pid, start_time_of(pid)) for pid in await asyncio.to_thread(descendants, child.pid)]
    if len(below) < _SANDBOXES * (LEFT + 1):
        raise SandboxError(f"only {len(below)} processes are seen below the child service")
    return below


async def _wait_for_end(processes: list[Process]) -> list[Process]:
    """Those that still run after a while."""
    deadline = time.monotonic() + _GONE_S
    while left := [process for process in processes if runs(process)]:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(_LOOK_AGAIN_S)  # not our children: nothing tells of their ends
    return left


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.kill()
    await child.communicate()
