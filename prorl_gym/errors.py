"""Every error that prorl_gym raises on purpose, named for the boundary that broke.

    ProrlGymError
     ├ ConfigError(ValueError)       at start; the command line exits with 2
     ├ ServiceError                  raised by the client only: the service gave no answer that it should give
     │   └ ServiceUnreachable        it gave none at all
     ├ RequestError                  answered over HTTP with `status`
     │   ├ UnknownTask      400
     │   ├ Unauthorized     401
     │   ├ ForeignOrigin    403
     │   ├ NoSuchPath       404
     │   ├ JobNotFound      404
     │   ├ MethodNotAllowed 405
     │   ├ DuplicateJob     409
     │   ├ BodyTooLarge     413
     │   ├ UnsupportedMedia 415
     │   ├ QueueFull        429
     │   └ NotRunning       503
     └ JobError                      recorded in one job's result, never stops a worker
         ├ RuntimeStartError         a sandbox did not come up
         ├ SandboxError              a sandbox broke while in use
         ├ BackendError              an inference endpoint broke its contract
         ├ HandlerError              task-family code raised
         ├ EvaluationError           a grader broke: no measurement, never a reward
         └ StageTimeout(TimeoutError)

A command that fails, a tool that times out or a malformed tool call is an observation for the model, not an error.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

Stage = Literal["init", "run", "eval"]


class ProrlGymError(Exception):
    """Root of every error that this package raises on purpose."""


class ConfigError(ProrlGymError, ValueError):
    """The configuration is wrong; the message names the key and what it accepts."""


class ServiceError(ProrlGymError):
    """The rollout service answered with something that is no reply of its own, an internal error say."""


class ServiceUnreachable(ServiceError):
    """The rollout service did not answer: refused, broke off, or over the deadline."""


class RequestError(ProrlGymError):
    """A request that cannot be served.

    Attributes:
        status: HTTP status of the answer.
        field: Path of the offending field in the body, e.g. `sampling_params.top_p`, or None.
        retry_after_s: Seconds after which the same request may succeed, or None.
    """

    status: ClassVar[int] = 400

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.retry_after_s = retry_after_s


class UnknownTask(RequestError):
    """The request names a task that no handler serves; the message lists the known ones."""


class Unauthorized(RequestError):
    """The bearer token is missing or wrong."""

    status = 401


class ForeignOrigin(RequestError):
    """A page of another site had somebody's browser send this."""

    status = 403


class NoSuchPath(RequestError):
    """Nothing is served there."""

    status = 404


class JobNotFound(RequestError):
    """No job of that id is known, or its result has expired."""

    status = 404


class MethodNotAllowed(RequestError):
    """The path takes other methods.

    Attributes:
        allowed: Those methods, for the answer's `Allow`; empty at a client, to whom the message says it.
    """

    status = 405

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        allowed: Sequence[str] = (),
    ) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.allowed = tuple(allowed)


class DuplicateJob(RequestError):
    """The id belongs to a job with another body."""

    status = 409


class BodyTooLarge(RequestError):
    """The request body exceeds `server.max_body_bytes`."""

    status = 413


class UnsupportedMedia(RequestError):
    """The body is not declared as JSON."""

    status = 415


class QueueFull(RequestError):
    """As many jobs wait as the queue may hold."""

    status = 429


class NotRunning(RequestError):
    """The pools are stopped or stopping."""

    status = 503


class JobError(ProrlGymError):
    """Something broke inside one job.

    Attributes:
        stage: The stage in which it broke, or None until the pipeline knows it.
        kind: One word for the boundary that broke, as it stands in `failure.kind`.
        infrastructure: True when the failure says nothing about the policy: the sample is masked.
    """

    kind: ClassVar[str] = "job"
    infrastructure: ClassVar[bool] = True

    def __init__(self, message: str, *, stage: Stage | None = None) -> None:
        super().__init__(message)
        self.stage = stage


class RuntimeStartError(JobError):
    """A sandbox did not come up."""

    kind = "runtime_start"


class SandboxError(JobError):
    """A sandbox, or the tool server inside it, broke while in use."""

    kind = "sandbox"


class BackendError(JobError):
    """An inference endpoint refused, broke off or answered something that contradicts itself.

    Attributes:
        retryable: True when the same call may succeed on this or another backend.
    """

    kind = "backend"

    def __init__(self, message: str, *, retryable: bool = True, stage: Stage | None = None) -> None:
        super().__init__(message, stage=stage)
        self.retryable = retryable


class HandlerError(JobError):
    """Task-family code raised something that is not a JobError."""

    kind = "handler"


class EvaluationError(JobError):
    """A grader broke: there is no measurement, and so no reward."""

    kind = "evaluation"


class StageTimeout(JobError, TimeoutError):
    """A stage, or the whole job, ran over its budget."""

    kind = "timeout"
