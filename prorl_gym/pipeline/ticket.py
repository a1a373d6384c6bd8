"""What a submitter holds of a job."""

from typing import Any

from prorl_gym.pipeline.events import EventLog
from prorl_gym.pipeline.outcome import Outcome
from prorl_gym.types import JobRequest, JobStatus


class Ticket:
    """One job as the outside sees it, from submit until its result expires.

    Attributes:
        id: The job's id, the client's own or ours.
        task: Resolved task name.
        request: As submitted.
        status: Where it is now.
        events: Replayable and live.
        outcome: None until the job has ended.
    """

    id: str
    task: str
    request: JobRequest
    status: JobStatus
    events: EventLog
    outcome: Outcome | None

    def partial_messages(self) -> list[dict[str, Any]]:
        """The messages so far, without token ids, in the shape of `types.Message`."""
        raise NotImplementedError

    async def wait(self, timeout_s: float | None = None) -> Outcome | None:
        """Wait for the end; None when it has not come within `timeout_s`. Cancelling the wait leaves the job alone."""
        raise NotImplementedError
