"""The pipeline: takes jobs in, runs their stages through three gates, answers every waiter.

The invariant: whoever waits for a job is answered, also across a stop; a job that was taken in is held by the pipeline
itself until it has ended.
"""

import asyncio
import hashlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from prorl_gym import __version__
from prorl_gym.config.models import ProrlConfig
from prorl_gym.errors import DuplicateJob, JobNotFound, NotRunning, QueueFull, RequestError, Stage
from prorl_gym.handlers.base import AgentHandler
from prorl_gym.handlers.registry import HandlerRegistry
from prorl_gym.pipeline.calls import CallFacilities
from prorl_gym.pipeline.execution import Execution, Shared
from prorl_gym.pipeline.footprint import footprint
from prorl_gym.pipeline.gate import Allowance, Gate
from prorl_gym.pipeline.leftovers import Leftovers
from prorl_gym.pipeline.outcome import Outcome
from prorl_gym.pipeline.scope import TEARDOWN_S
from prorl_gym.pipeline.store import TicketStore
from prorl_gym.pipeline.threads import HandlerThreads
from prorl_gym.pipeline.ticket import Ticket
from prorl_gym.pipeline.watchdog import Watchdog
from prorl_gym.types import JobRequest, JobStatus

logger = logging.getLogger("prorl_gym.pipeline")

State = Literal["running", "stopping", "stopped"]

RETRY_AFTER_S = (1.0, 60.0)
"""Least and most that a full queue asks a client to wait."""


@dataclass(frozen=True, slots=True)
class CancelReport:
    """What a cancel did, as ids."""

    cancelled: list[str]
    already_ended: list[str]
    not_found: list[str]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pipeline at one moment; the fields are those of `types.ServerStatus`.

    Attributes:
        jobs: By status; those that have ended are counted since the pipeline was made.
        total: Jobs taken in since then.
    """

    status: State
    jobs: dict[str, int]
    total: int
    init_queue: int
    run_queue: int
    eval_queue: int
    active_init: int
    active_run: int
    active_eval: int
    pools: dict[str, Any]
    leftovers: list[dict[str, Any]]


class Pipeline:
    """Jobs in, outcomes out. For one event loop; handlers are started and stopped by whoever made the registry."""

    def __init__(self, config: ProrlConfig, handlers: HandlerRegistry) -> None:
        settings = config.pipeline
        self.state: State = "stopped"
        self._config = settings
        self._handlers = handlers
        self._store = TicketStore(config.results.ttl_s, config.results.max_count, config.results.max_bytes)
        self._leftovers = Leftovers()
        self._ready_ahead = Allowance(settings.ready_ahead or settings.run.workers)
        self._gates: dict[Stage, Gate] = {
            "init": Gate(settings.init.workers, self._ready_ahead),
            "run": Gate(settings.run.workers),
            "eval": Gate(settings.eval.workers),
        }
        self._threads = HandlerThreads(self._thread_limit)
        self._watchdog = Watchdog(settings.blocked_loop_warning_s)
        self._jobs: Counter[JobStatus] = Counter()
        self._total = 0
        self._unfinished: set[asyncio.Task[None]] = set()
        self._stop: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._admitting_since = time.monotonic()
        self._shared = Shared(
            config=settings,
            gates=self._gates,
            calls=CallFacilities(self._threads, self._leftovers, settings.cancel_grace_s),
            moved=self._moved,
            ended=self._ended,
            provenance={
                "service_version": __version__,
                "config_digest": hashlib.sha256(config.model_dump_json().encode()).hexdigest(),
            },
        )

    async def start(self) -> None:
        """Take jobs. A second call is harmless; after a stop it starts again, results kept."""
        if self._stop is not None:
            await asyncio.shield(self._stop)
        if self.state != "stopped":
            return
        self._admitting_since = time.monotonic()
        self._threads.reopen()
        self._watchdog.start()
        self.state = "running"

    async def stop(self, *, drain: bool = False, deadline_s: float | None = None) -> None:
        """Refuse new jobs, end all, and return when every job is final and what could be ended has been.

        Once jobs are cancelled this returns within the grace and the teardown bound; what is left over by then is
        listed. A second call joins the first, and cuts its drain short unless it drains too.

        Args:
            drain: Let the jobs end by themselves first.
            deadline_s: How long a drain may take before the rest is cancelled; None waits for all of them.
        """
        if not drain:
            self._hurry.set()
        if self._stop is None:
            if self.state == "stopped":
                self._hurry.clear()
                return
            self.state = "stopping"
            self._stop = asyncio.create_task(self._stop_all(drain, deadline_s), name="pipeline stop")
        await asyncio.shield(self._stop)

    def submit(self, request: JobRequest) -> Ticket:
        """Take a job in. The same id with an equal body gives the ticket of the job that there already is.

        Raises:
            NotRunning: Stopped or stopping.
            UnknownTask: No handler of that name; lists the known ones.
            DuplicateJob: The id belongs to another body.
            QueueFull: As many jobs wait as may.
            RequestError: The handler refuses the request.
        """
        if request.job_id is not None and (known := self._store.get(request.job_id)) is not None:
            if known.request != request:
                raise DuplicateJob(f"job {request.job_id!r} was submitted with another body", field="job_id")
            return known
        if self.state != "running":
            raise NotRunning(f"the pools are {self.state}")
        task, handler = self._handlers.resolve(request)
        _check(task, handler, request)
        queued = self._jobs[JobStatus.QUEUED]
        if queued >= self._config.max_queued:
            raise QueueFull(f"{queued} jobs wait already", retry_after_s=self._seconds_per_admission())
        ticket = Ticket(request.job_id or uuid.uuid4().hex, task, request)
        self._total += 1
        self._jobs[ticket.status] += 1
        self._store.add(ticket)
        execution = Execution(ticket, handler, self._shared)
        ticket.attach(execution)
        self._unfinished.add(execution.task)
        execution.task.add_done_callback(self._unfinished.discard)
        return ticket

    def get(self, job_id: str) -> Ticket:
        """The ticket of a job.

        Raises:
            JobNotFound: Never seen, or its result has expired.
        """
        ticket = self._store.get(job_id)
        if ticket is None:
            raise JobNotFound(f"no job {job_id!r}: never seen, or its result has expired", field="job_id")
        return ticket

    def cancel(
        self, *, job_ids: Collection[str] = (), prefix: str | None = None, group_id: str | None = None
    ) -> CancelReport:
        """Cancel the union of what is named; waiters are answered before this returns.

        Raises:
            RequestError: Nothing is named.
        """
        if not job_ids and prefix is None and group_id is None:
            raise RequestError("name at least one of job_id, job_ids, prefix and group_id")
        named = dict.fromkeys(job_ids)
        if prefix is not None:
            named |= dict.fromkeys(self._store.with_prefix(prefix))
        if group_id is not None:
            named |= dict.fromkeys(self._store.in_group(group_id))
        report = CancelReport([], [], [])
        for job_id in named:
            ticket = self._store.get(job_id)
            if ticket is None:
                report.not_found.append(job_id)
            elif ticket.cancel("cancelled on request"):
                report.cancelled.append(job_id)
            else:
                report.already_ended.append(job_id)
        return report

    def resize(self, init: int | None = None, run: int | None = None, eval: int | None = None) -> None:
        """Change the stages' pools while they run; None leaves one as it is. Shrinking interrupts nobody.

        `ready_ahead` follows `run` unless it was configured.
        """
        sizes: dict[Stage, int | None] = {"init": init, "run": run, "eval": eval}
        for stage, size in sizes.items():
            if size is not None:
                self._gates[stage].resize(size)
        if run is not None and self._config.ready_ahead is None:
            self._gates["init"].resize_allowance(run)

    def snapshot(self) -> Snapshot:
        """Counts and occupancies now."""
        self._store.expire()
        gates = self._gates
        pools: dict[str, Any] = {
            stage: {"workers": gate.size, "active": gate.active, "queued": gate.waiting}
            for stage, gate in gates.items()
        }
        pools["ready_ahead"] = {"limit": self._ready_ahead.limit, "taken": self._ready_ahead.taken}
        pools["handler_threads"] = self._threads.count
        return Snapshot(
            status=self.state,
            jobs={status.value: self._jobs[status] for status in JobStatus},
            total=self._total,
            init_queue=gates["init"].waiting,
            run_queue=gates["run"].waiting,
            eval_queue=gates["eval"].waiting,
            active_init=gates["init"].active,
            active_run=gates["run"].active,
            active_eval=gates["eval"].active,
            pools=pools,
            leftovers=self._leftovers.entries(),
        )

    async def _stop_all(self, drain: bool, deadline_s: float | None) -> None:
        try:
            if drain:
                await self._drain(deadline_s)
            for ticket in self._store.under_way():
                ticket.cancel("the service is stopping")
            if self._unfinished:
                await asyncio.wait(self._unfinished, timeout=self._config.cancel_grace_s + TEARDOWN_S + 1)
            if self._unfinished:
                logger.error("%d jobs have an outcome but could not be taken down in time", len(self._unfinished))
            self._threads.close()
            self._watchdog.stop()
        finally:
            self.state = "stopped"
            self._stop = None
            self._hurry.clear()

    async def _drain(self, deadline_s: float | None) -> None:
        """Wait until every job has ended, the deadline has come or somebody is in a hurry."""
        hurry = asyncio.create_task(self._hurry.wait())
        ended = asyncio.create_task(self._all_done())
        try:
            await asyncio.wait([hurry, ended], timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurry.cancel()
            ended.cancel()

    async def _all_done(self) -> None:
        while self._unfinished:
            await asyncio.wait(self._unfinished)

    def _moved(self, before: JobStatus, after: JobStatus) -> None:
        self._jobs[before] -= 1
        self._jobs[after] += 1

    def _ended(self, ticket: Ticket, outcome: Outcome) -> None:
        self._store.ended(ticket, footprint(outcome))

    def _thread_limit(self) -> int:
        """One for every slot, and one for each that a call which never returned has taken away."""
        return sum(max(gate.size, gate.active) for gate in self._gates.values()) + self._leftovers.handlers

    def _seconds_per_admission(self) -> float:
        """After how long, on the average so far, a place in the queue becomes free."""
        admitted = self._total - self._jobs[JobStatus.QUEUED]
        average = (time.monotonic() - self._admitting_since) / max(1, admitted)
        return min(max(average, RETRY_AFTER_S[0]), RETRY_AFTER_S[1])


def _check(task: str, handler: AgentHandler, request: JobRequest) -> None:
    try:
        handler.check(request)
    except RequestError:
        raise
    except Exception as error:
        logger.exception("%s could not check a request", task)
        raise RequestError(f"{task} cannot take this request: {type(error).__name__}: {error}") from error
