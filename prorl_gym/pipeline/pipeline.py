"""The pipeline: takes jobs in, runs their stages through three gates, answers every waiter."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from prorl_gym.config.models import ProrlConfig
from prorl_gym.handlers.registry import HandlerRegistry
from prorl_gym.pipeline.ticket import Ticket
from prorl_gym.types import JobRequest

State = Literal["running", "stopping", "stopped"]


@dataclass(frozen=True, slots=True)
class CancelReport:
    """What a cancel did, as ids."""

    cancelled: list[str]
    already_ended: list[str]
    not_found: list[str]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pipeline at one moment; the fields are those of `types.ServerStatus`."""

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
        self.state: State = "stopped"

    async def start(self) -> None:
        """Take jobs. A second call is harmless; after a stop it starts again, results kept."""
        raise NotImplementedError

    async def stop(self, *, drain: bool = False, deadline_s: float | None = None) -> None:
        """Refuse new jobs, end all, and return when every job is final and what could be ended has been.

        Args:
            drain: Let the jobs end by themselves first.
            deadline_s: How long a drain may take before the rest is cancelled; None waits for all of them.
        """
        raise NotImplementedError

    def submit(self, request: JobRequest) -> Ticket:
        """Take a job in. The same id with an equal body gives the ticket of the job that there already is.

        Raises:
            NotRunning: Stopped or stopping.
            UnknownTask: No handler of that name; lists the known ones.
            DuplicateJob: The id belongs to another body.
            QueueFull: As many jobs wait as may.
            RequestError: The handler refuses the request.
        """
        raise NotImplementedError

    def get(self, job_id: str) -> Ticket:
        """The ticket of a job.

        Raises:
            JobNotFound: Never seen, or its result has expired.
        """
        raise NotImplementedError

    def cancel(
        self, *, job_ids: Collection[str] = (), prefix: str | None = None, group_id: str | None = None
    ) -> CancelReport:
        """Cancel the union of what is named; waiters are answered before this returns.

        Raises:
            RequestError: Nothing is named.
        """
        raise NotImplementedError

    def resize(self, init: int | None = None, run: int | None = None, eval: int | None = None) -> None:
        """Change the stages' pools while they run; None leaves one as it is. Shrinking interrupts nobody."""
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        """Counts and occupancies now."""
        raise NotImplementedError
