"""What a submitter holds of a job."""

import asyncio
from typing import Any, Protocol

from prorl_gym.pipeline.events import EventLog
from prorl_gym.pipeline.outcome import Outcome, safe_messages
from prorl_gym.tokens.trajectory import Trajectory
from prorl_gym.types import JobRequest, JobStatus


class Running(Protocol):
    """How a ticket reaches the job behind it while that lasts."""

    def trajectory(self) -> Trajectory:
        """What has been recorded so far."""
        ...

    def cancel(self, reason: str) -> None:
        """End the job; its ticket has an outcome when this returns."""
        ...


class Ticket:
    """One job as the outside sees it, from submit until its result expires. For the event loop's thread.

    Attributes:
        id: The job's id, the client's own or ours.
        task: Resolved task name.
        request: As submitted.
        status: Where it is now; a job that waits for RUN or EVAL is still in the stage that it has left.
        events: Replayable and live.
        outcome: None until the job has ended.
    """

    __slots__ = ("_running", "_waiters", "events", "id", "outcome", "request", "status", "task")

    def __init__(self, job_id: str, task: str, request: JobRequest) -> None:
        self.id = job_id
        self.task = task
        self.request = request
        self.status = JobStatus.QUEUED
        self.events = EventLog()
        self.outcome: Outcome | None = None
        self._running: Running | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def attach(self, running: Running) -> None:
        """Tie the ticket to its job."""
        self._running = running

    def trajectory(self) -> Trajectory | None:
        """What has been recorded so far, or in the end; None before the job is there."""
        if self.outcome is not None:
            return self.outcome.trajectory
        return None if self._running is None else self._running.trajectory()

    def partial_messages(self) -> list[dict[str, Any]]:
        """The messages so far, without token ids, in the shape of `types.Message`."""
        trajectory = self.trajectory()
        return [] if trajectory is None else safe_messages(trajectory.messages(token_ids=False))

    async def wait(self, timeout_s: float | None = None) -> Outcome | None:
        """Wait for the end; None when it has not come within `timeout_s`. Cancelling the wait leaves the job alone."""
        if self.outcome is not None:
            return self.outcome
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            if timeout_s is None:
                await waiter
            else:
                await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            if self.outcome is None:
                self._waiters.remove(waiter)
        return self.outcome

    def cancel(self, reason: str) -> bool:
        """End the job as cancelled; False when it had ended before. Waiters are answered whatever its handler does."""
        if self.outcome is not None or self._running is None:
            return False
        self._running.cancel(reason)
        return True

    def end(self, outcome: Outcome) -> bool:
        """Give the ticket its outcome and wake whoever waits; False, and nothing changes, when it has one."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self.status = outcome.status
        self._running = None
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        return True
