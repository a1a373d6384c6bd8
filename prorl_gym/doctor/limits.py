"""Limits: each is given a small bound in a sandbox of its own, gone over by a little, and compared with the promise.

What is tried is bounded itself, so that nothing happens to a host that enforces nothing; and it is tried only where the
sandbox has process ids of its own.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from prorl_gym.doctor import inside
from prorl_gym.doctor.finding import Finding, failed, note, ok
from prorl_gym.doctor.subject import CALL_S, Subject, ask
from prorl_gym.runtimes.base import Limits, Runtime

_MIB = 1 << 20
_MEMORY_BYTES, _TAKEN_BYTES = 160 * _MIB, 256 * _MIB
_PROCESSES, _STARTED = 48, 96
_FILE_BYTES, _DISK_BYTES, _WRITTEN_BYTES = 8 * _MIB, 32 * _MIB, 64 * _MIB
_OUTPUT_BYTES, _SLACK_BYTES = 4_000, 400

_FIXES = {
    "memory": "give the service a control group (systemd-run --user --scope -p Delegate=yes python -m prorl_gym), or "
              "let it read /proc/PID/smaps_rollup of its sandboxes",
    "processes": "run on Linux 5.14 or later, or the service as root: before, the limit counts all of a user's",
    "file": "this kernel does not hold RLIMIT_FSIZE: put paths.state on a file system with a quota",
    "disk": "set runtime.disk=memory, choose runtime=apptainer, or put paths.state on a file system with a quota",
    "output": "report it with this output",
}  # fmt: skip


async def memory_limit(subject: Subject) -> Finding:
    """A process over it is killed; the sandbox lives on."""

    async def over(sandbox: Runtime) -> tuple[bool, str]:
        answer = await ask(sandbox, inside.takes_memory, _TAKEN_BYTES)
        await ask(sandbox, inside.pid_namespace)
        what = f"a process that took {_mb(_TAKEN_BYTES)} with a limit of {_mb(_MEMORY_BYTES)}"
        return not answer["held"], f"{what} was " + ("let" if answer["held"] else "ended; the sandbox lives on")

    return await _judge(subject, "memory", replace(subject.spec.limits, memory_bytes=_MEMORY_BYTES), over)


async def process_limit(subject: Subject) -> Finding:
    """A fork over it fails."""

    async def over(sandbox: Runtime) -> tuple[bool, str]:
        started = await ask(sandbox, inside.starts_processes, _STARTED)
        return started <= _PROCESSES, f"{started} of {_STARTED} more processes started with a limit of {_PROCESSES}"

    return await _judge(subject, "processes", replace(subject.spec.limits, processes=_PROCESSES), over)


async def file_limit(subject: Subject) -> Finding:
    """A write over it fails."""

    async def over(sandbox: Runtime) -> tuple[bool, str]:
        answer = await ask(sandbox, inside.writes, 2 * _FILE_BYTES, 2 * _FILE_BYTES)
        held = answer["stopped"] is not None and answer["written"] <= _FILE_BYTES
        return held, f"{_mb(answer['written'])} of a file were written with a limit of {_mb(_FILE_BYTES)}"

    return await _judge(subject, "file", replace(subject.spec.limits, file_bytes=_FILE_BYTES), over)


async def disk_limit(subject: Subject) -> Finding:
    """All files together stay under it."""

    async def over(sandbox: Runtime) -> tuple[bool, str]:
        answer = await ask(sandbox, inside.writes, _WRITTEN_BYTES, _FILE_BYTES)
        held = answer["stopped"] is not None  # what a FUSE layer has buffered may be beyond the limit by then
        return held, f"{_mb(answer['written'])} were written with a limit of {_mb(_DISK_BYTES)}"

    return await _judge(subject, "disk", replace(subject.spec.limits, disk_bytes=_DISK_BYTES), over)


async def output_limit(subject: Subject) -> Finding:
    """A tool's reply stays under it."""

    async def over(sandbox: Runtime) -> tuple[bool, str]:
        reply = await sandbox.call("ipython", {"code": "print('x' * 1_000_000)"}, timeout_s=CALL_S)
        size = len(reply.text.encode())
        return size <= _OUTPUT_BYTES + _SLACK_BYTES, f"{size:,} of 1,000,000 bytes with a limit of {_OUTPUT_BYTES:,}"

    return await _judge(subject, "output", replace(subject.spec.limits, output_bytes=_OUTPUT_BYTES), over)


Over = Callable[[Runtime], Awaitable[tuple[bool, str]]]
"""Goes over a limit inside; whether it held, and what happened in words."""


async def _judge(subject: Subject, limit: str, limits: Limits, over: Over) -> Finding:
    name = f"{limit} limit"
    async with subject.sandbox(limits=limits) as sandbox:
        held, words = await over(sandbox)
        promised = limit not in sandbox.describe().unenforced
    if held:
        return ok(name, f"enforced: {words}")
    if promised:
        return failed(name, f"not enforced, though promised: {words}", _FIXES[limit])
    return note(name, f"not enforced by {subject.spec.kind} on this host: {words}", _FIXES[limit])


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.0f} MB"


LIMIT_CHECKS: dict[str, Callable[[Subject], Awaitable[Finding]]] = {
    "memory limit": memory_limit,
    "processes limit": process_limit,
    "file limit": file_limit,
    "disk limit": disk_limit,
    "output limit": output_limit,
}
