"""Grader processes: where hostile answers are looked at, never in the service itself.

The invariant: one request at a time per worker, each under a deadline and a memory bound; a worker that ran over
either, crashed, or whose caller was cancelled is killed and replaced. Nothing but JSON crosses the pipe.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

import orjson

from prorl_gym.config.models import usable_cpus
from prorl_gym.errors import ConfigError, EvaluationError
from prorl_gym.resources import grader_worker

log = logging.getLogger(__name__)

Confine = Callable[[Sequence[str], Sequence[Path]], Sequence[str]]
"""Wraps a command so that it sees the given paths, read-only, and neither network nor anything else of the host."""

START_TIMEOUT_S = 60.0
MAX_REPLY_BYTES = 16 << 20
RECYCLE_AFTER = 2_000
"""Requests per worker: caches of a symbolic library must not add up to the memory bound."""
REAP_TIMEOUT_S = 5.0
ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}  # noqa: S108


class WorkerLost(EvaluationError):
    """A request cost the worker its life. Whether that is the candidate's fault the caller knows.

    Attributes:
        cause: Over its time, over its memory, or the process crashed.
    """

    def __init__(self, message: str, cause: Literal["timeout", "memory", "crash"]) -> None:
        super().__init__(message, stage="eval")
        self.cause = cause


class _Died(EvaluationError):
    """The process ended by itself."""


class GraderPool:
    """Persistent workers around one grader file, started as they are needed.

    Args:
        grader: A Python file that defines `grade(request: dict) -> dict`; it may import installed packages.
        confine: How workers are shut in; None runs them bare, for runtimes without isolation only.
        workers: At most; None is one per usable CPU.
        timeout_s: Of one request.
        memory_bytes: Of one worker, address space; None is no bound.
    """

    def __init__(
        self,
        grader: Path,
        confine: Confine | None,
        *,
        workers: int | None = None,
        timeout_s: float = 10.0,
        memory_bytes: int | None = 2 << 30,
    ) -> None:
        self.grader = grader
        self.timeout_s = timeout_s
        self._confine = confine
        self._memory_bytes = memory_bytes
        self._slots = asyncio.Semaphore(workers or usable_cpus())
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()
        self._stopped = False

    async def start(self) -> None:
        """Start the first worker, to learn at once whether any can.

        Raises:
            ConfigError: The grader does not load or its sandbox does not start; says why.
        """
        self._stopped = False
        try:
            async with self._worker():
                pass
        except EvaluationError as error:
            raise ConfigError(str(error)) from error

    async def stop(self) -> None:
        """Kill every worker and see them gone; idempotent. Requests in flight end as EvaluationErrors."""
        self._stopped = True
        self._idle.clear()
        for worker in self._alive:
            worker.kill()
        for worker in self._alive:
            await worker.gone()
        self._alive.clear()

    async def grade(self, request: Mapping[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Ask one worker. Waiting for a free one does not count towards the deadline; cancelling kills the worker.

        Raises:
            WorkerLost: Over `timeout_s` (default: the pool's), over the memory bound, or crashed.
            EvaluationError: The grader raised or answered nonsense; or the pool is stopped.
        """
        line = _encoded(request) + b"\n"
        limit_s = timeout_s or self.timeout_s
        async with self._worker() as worker:
            try:
                async with asyncio.timeout(limit_s):
                    reply = await worker.ask(line)
            except TimeoutError:
                raise WorkerLost(f"{self.grader.name} took longer than {limit_s:g} s", "timeout") from None
            except _Died as error:
                if self._stopped:
                    raise
                raise WorkerLost(f"{self.grader.name} crashed", "crash") from error
            if reply.get("limit") == "memory":
                raise WorkerLost(f"{self.grader.name} ran out of memory", "memory")
        verdict = reply.get("reply")
        if not isinstance(verdict, dict):
            raise EvaluationError(f"{self.grader} failed: {reply.get('error', 'its reply is no object')}", stage="eval")
        return verdict

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator["_Worker"]:
        """A worker of one's own; a block that raises leaves it in an unknown state, so it is killed."""
        async with self._slots:
            if self._stopped:
                raise EvaluationError("the grader pool is stopped", stage="eval")
            worker = self._idle.pop() if self._idle else await self._start_worker()
            try:
                yield worker
            except BaseException:
                worker.kill()
                raise
            if self._stopped or worker.served >= RECYCLE_AFTER:
                worker.kill()
            else:
                self._idle.append(worker)

    async def _start_worker(self) -> "_Worker":
        code = Path(grader_worker.__file__)
        command: Sequence[str] = (sys.executable, "-I", str(code), str(self.grader), str(self._memory_bytes or 0))
        if self._confine is not None:
            command = self._confine(command, (code, self.grader.parent))
        self._alive = {worker for worker in self._alive if worker.alive}
        worker = await _Worker.start(command)
        self._alive.add(worker)
        try:
            await worker.wait_until_ready(self.grader)
        except BaseException:
            worker.kill()
            raise
        return worker


class _Worker:
    """One process. Its leader's group is ours alone, and its pipes end with it."""

    def __init__(
        self, process: asyncio.subprocess.Process, transport: asyncio.SubprocessTransport, complaints: IO[bytes]
    ) -> None:
        self.served = 0
        self._process = process
        self._transport = transport
        self._complaints = complaints

    @classmethod
    async def start(cls, command: Sequence[str]) -> "_Worker":
        loop = asyncio.get_running_loop()
        complaints = tempfile.TemporaryFile()
        try:
            transport, protocol = await loop.subprocess_exec(
                lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=MAX_REPLY_BYTES, loop=loop),
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=complaints,
                start_new_session=True,
                env=ENVIRONMENT,
            )
        except BaseException as error:
            complaints.close()
            if isinstance(error, OSError):
                raise EvaluationError(f"no grader process: {error}", stage="eval") from error
            raise
        return cls(asyncio.subprocess.Process(transport, protocol, loop), transport, complaints)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def wait_until_ready(self, grader: Path) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await self._read()
        except TimeoutError:
            raise EvaluationError(f"{grader} did not load within {START_TIMEOUT_S:g} s", stage="eval") from None
        except EvaluationError as error:
            raise EvaluationError(f"{grader} did not start: {error}: {self._last_words()}", stage="eval") from error
        finally:
            self._complaints.close()
        if reply.get("ready") is not True:
            raise EvaluationError(f"{grader} does not load: {reply.get('error')}", stage="eval")

    async def ask(self, line: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None  # noqa: S101 - a pipe by construction
        self.served += 1
        try:
            self._process.stdin.write(line)
            await self._process.stdin.drain()
        except OSError as error:
            raise _Died(f"the grader process died: {error!r}", stage="eval") from error
        return await self._read()

    def kill(self) -> None:
        """End the process and all it started, at once; idempotent."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def gone(self) -> None:
        """Wait until a killed process is reaped and its pipes are closed, not for ever."""
        try:
            async with asyncio.timeout(REAP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            log.warning("grader process %d is still there %g s after SIGKILL", self._process.pid, REAP_TIMEOUT_S)
        self._transport.close()
        await asyncio.sleep(0)  # the loop closes the descriptors in its next round

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None  # noqa: S101 - a pipe by construction
        try:
            line = await self._process.stdout.readline()
        except ValueError as error:
            raise EvaluationError(f"the grader's reply is over {MAX_REPLY_BYTES} bytes", stage="eval") from error
        if not line.endswith(b"\n"):
            raise _Died("the grader process died", stage="eval")
        try:
            reply = json.loads(line)  # a lone surrogate may come back, which orjson refuses
        except ValueError as error:
            raise EvaluationError(f"the grader's reply is no JSON: {error}", stage="eval") from error
        if not isinstance(reply, dict):
            raise EvaluationError("the grader's reply is no JSON object", stage="eval")
        return reply

    def _last_words(self) -> str:
        self._complaints.seek(0)
        return self._complaints.read(64_000)[-2_000:].decode(errors="replace").strip() or "it said nothing"


def _encoded(request: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(request)
    except TypeError:  # a lone surrogate, or an integer beyond 64 bits
        return json.dumps(request).encode()
