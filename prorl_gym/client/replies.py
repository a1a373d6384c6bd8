"""Replies of the service that are no job: small models that ignore what a newer server adds."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from prorl_gym.types import JobStatus


class _Reply(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Accepted(_Reply):
    """A job was taken in, or is known already."""

    job_id: str
    status: JobStatus


class CancelReport(_Reply):
    """What became of each job that was named."""

    cancelled: list[str] = []
    already_ended: list[str] = []
    not_found: list[str] = []


class Removed(_Reply):
    """Whether there was such an endpoint."""

    removed: bool


class ServiceState(_Reply):
    """Where the pools are; `instance_id` is new at each start of the service's process."""

    status: Literal["running", "stopping", "stopped"]
    instance_id: str


class Environments(_Reply):
    """What `task` may name, and the environments behind those tasks that have one."""

    tasks: list[str] = []
    environments: list[dict[str, Any]] = []


class JobEvent(_Reply):
    """Something that happened to a job.

    `event` is a stage, a turn, a tool call, whatever the handler emits, and last of all the final status. `seq` counts
    from 1; a gap means that older events are gone. `at` is Unix time in seconds.
    """

    model_config = ConfigDict(extra="allow")

    seq: int
    event: str
    at: float

    @property
    def fields(self) -> dict[str, Any]:
        """What belongs to this event beyond its name and time."""
        return dict(self.model_extra or {})

    @property
    def last(self) -> bool:
        """True for the final status, after which nothing comes."""
        return self.event in _FINAL


_FINAL = frozenset(status.value for status in JobStatus if status.final)
