"""How a job ended: the JobResult before it becomes JSON.

The invariant: an outcome never changes, so any thread may export it; token arrays are held once, in the trajectory, and
become lists only in an export.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from prorl_gym.errors import JobError, Stage
from prorl_gym.pipeline.json_value import json_safe
from prorl_gym.tokens.trajectory import Trajectory
from prorl_gym.types import JobRequest, JobStatus, ResultPart, StopReason, Timing

CriticalError = Literal["init", "run", "eval", "timeout", "cancelled"]

REWRITABLE = ("reward_components", "artifacts", "git_patch", "provenance", "warnings")
"""What `AgentHandler.final_result` may change; the rest is the pipeline's own account."""

_ALL_PARTS: frozenset[str] = frozenset(get_args(ResultPart)) - {"ledger"}
_FINISHED = frozenset({StopReason.ANSWERED, StopReason.SUBMITTED})


@dataclass(frozen=True, slots=True)
class JobFailure:
    """What broke, where, and in whose words."""

    stage: Stage | None
    kind: str
    message: str

    @classmethod
    def of(cls, error: JobError) -> "JobFailure":
        """The record of an error."""
        return cls(error.stage, error.kind, str(error))


@dataclass(frozen=True, slots=True)
class Score:
    """What EVAL made of the job; the default is no measurement."""

    reward: float | None = None
    resolved: bool | None = None
    components: Mapping[str, Any] = field(default_factory=dict)
    masked: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """One job's end, immutable. Any thread may export it."""

    job_id: str
    task: str
    request: JobRequest
    status: JobStatus
    stop_reason: StopReason | None
    trajectory: Trajectory
    timing: Timing
    score: Score = Score()
    failure: JobFailure | None = None
    critical_error: CriticalError | None = None
    git_patch: str | None = None
    artifacts: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def result(self, include: Collection[ResultPart] | None = None) -> dict[str, Any]:
        """The result in the shape of `types.JobResult`, safe for any JSON encoder.

        Args:
            include: Which heavy parts to send; None sends all but the ledger. A ledger that the request asked for with
                `return_ledger` is sent in any case.
        """
        parts = _ALL_PARTS if include is None else frozenset(include)
        result = self._core()
        if "messages" in parts or "token_ids" in parts:
            result["messages"] = safe_messages(self.trajectory.messages("token_ids" in parts))
            result["tools"] = json_safe(self.trajectory.tools)
        if "segments" in parts:
            result["segments"] = self.trajectory.segments()
        if "artifacts" in parts:
            result["artifacts"] = json_safe(self.artifacts)
        if "ledger" in parts or self.request.return_ledger:
            result["ledger"] = json_safe(self.trajectory.ledger())
        return result

    def rewritable(self) -> dict[str, Any]:
        """What `final_result` is handed: the result without its heavy parts, but with the artifacts as they are."""
        return {**self._core(), "artifacts": dict(self.artifacts)}

    def rewritten(self, result: object) -> "Outcome":
        """This outcome with the fields of `REWRITABLE` taken from `result`.

        Raises:
            TypeError: One of them is not what it has to be; says which.
        """
        if not isinstance(result, Mapping):
            raise TypeError(f"it returned {type(result).__name__}, not the result")
        new = {name: result[name] for name in REWRITABLE if name in result}
        for name in new.keys() & {"reward_components", "artifacts", "provenance"}:
            if not isinstance(new[name], Mapping):
                raise TypeError(f"{name} must be a mapping, not {type(new[name]).__name__}")
        patch = new.get("git_patch", self.git_patch)
        if not isinstance(patch, str | None):
            raise TypeError(f"git_patch must be text or None, not {type(patch).__name__}")
        return replace(
            self,
            score=replace(self.score, components=new.get("reward_components", self.score.components)),
            artifacts=new.get("artifacts", self.artifacts),
            provenance=new.get("provenance", self.provenance),
            git_patch=patch,
            warnings=tuple(str(line) for line in new.get("warnings", self.warnings)),
        )

    def _core(self) -> dict[str, Any]:
        failure, score, row = self.failure, self.score, self.request.instance
        instance_id, trajectory_id = row.get("instance_id"), row.get("trajectory_id")
        if not isinstance(trajectory_id, str | int) or isinstance(trajectory_id, bool):
            trajectory_id = None
        return {
            "job_id": self.job_id,
            "instance_id": json_safe(str(instance_id)) if isinstance(instance_id, str | int) else None,
            "trajectory_id": json_safe(trajectory_id),
            "group_id": json_safe(self.request.group_id),
            "task": self.task,
            "status": self.status.value,
            "stop_reason": None if self.stop_reason is None else self.stop_reason.value,
            "reward": score.reward,
            "reward_components": json_safe(score.components),
            "resolved": score.resolved,
            "success": self.status is JobStatus.COMPLETED,
            "mask_sample": score.masked,
            "filter": score.masked,
            "failure": failure
            and {"stage": failure.stage, "kind": failure.kind, "message": json_safe(failure.message)},
            "error": failure and json_safe(failure.message),
            "traceback": None,
            "critical_error": self.critical_error,
            "finish": self.stop_reason in _FINISHED,
            "end_properly": self.stop_reason is not None and self.stop_reason.terminated,
            "git_patch": json_safe(self.git_patch),
            "policy_versions": self.trajectory.policy_versions(),
            "timing": self.timing.model_dump(),
            "provenance": json_safe(self.provenance),
            "warnings": json_safe(self.warnings),
        }


def safe_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with those of their fields made safe that repeat what a model or a row said; ids need no look."""
    for message in messages:
        for name in ("content", "reasoning_content", "tool_calls", "tool_call_id", "name"):
            if message.get(name) is not None:
                message[name] = json_safe(message[name])
    return messages
