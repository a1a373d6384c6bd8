"""Bodies of the control endpoints; those of jobs are in `prorl_gym.types`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from prorl_gym.types import JobStatus, PolicyName, ResultPart

Address = Annotated[str, Field(min_length=1, max_length=2000)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _split(value: object) -> object:
    """`a,b` and `a&include=b` mean the same."""
    parts = value if isinstance(value, list) else [value]
    return [part for text in parts for part in str(text).split(",") if part]


class JobQuery(_Body):
    """How to look at a job."""

    wait_s: float = Field(0.0, ge=0, le=600)
    """Answer when the job has ended, at the latest after so long."""
    include: Annotated[tuple[ResultPart, ...], BeforeValidator(_split)] = ("messages", "artifacts")
    """Which parts of the result to send, comma-separated. Token arrays come only when named."""


class Accepted(BaseModel):
    """A job was taken in, or is known already."""

    job_id: str
    status: JobStatus


class CancelBody(_Body):
    """Which jobs to cancel: the union of what is named, and something must be."""

    job_id: str | None = None
    job_ids: tuple[str, ...] = ()
    prefix: str | None = None
    group_id: str | None = None


class CancelAnswer(BaseModel):
    """What became of each job that was named."""

    cancelled: list[str]
    already_ended: list[str]
    not_found: list[str]


class AddLlmServer(_Body):
    """An inference endpoint to sample from; the same address again updates it."""

    address: Address
    """With or without `/v1`."""
    policy_version: int | None = None
    policy: PolicyName = "default"
    """Whose backend this is, so that several trainers share one service."""
    dialect: str | None = Field(None, max_length=50)
    model: str | None = Field(None, max_length=1000)
    api_key_env: str | None = Field(None, max_length=200)
    """Name of the variable in the service's environment that holds the engine's key; one of those that
    `backend.api_key_envs` (or `backend.api_key_env`) of its configuration lists, else a 400."""


class ClearLlmServer(_Body):
    """Take all of a policy's endpoints away."""

    policy: PolicyName = "default"
    in_flight: Literal["continue", "park", "abort"] = "continue"
    """`continue`: tasks keep their backend to their end. `park`: answers once calls in flight have drained. `abort`:
    calls are cut, their tasks continue after the next add."""


class RemoveLlmServer(_Body):
    """Take one endpoint away; its tasks move on."""

    address: Address
    policy: PolicyName = "default"


class Removed(BaseModel):
    """Whether there was such an endpoint."""

    removed: bool


class StopBody(_Body):
    """How to stop."""

    drain: bool = False
    """Let the jobs end by themselves first."""
    deadline_s: float | None = Field(None, ge=0, allow_inf_nan=False)
    """How long a drain may take; None waits for all."""
    exit: bool = False
    """End the process too, as SIGTERM does; the answer comes before."""


class PoolSizes(_Body):
    """New sizes; what is left out stays."""

    init: int | None = Field(None, ge=1, le=100_000)
    run: int | None = Field(None, ge=1, le=100_000)
    eval: int | None = Field(None, ge=1, le=100_000)


class State(BaseModel):
    """Where the pools are."""

    status: Literal["running", "stopping", "stopped"]
    instance_id: str


class EnvironmentList(BaseModel):
    """What `task` may name."""

    tasks: list[str]
    environments: list[dict[str, Any]]
