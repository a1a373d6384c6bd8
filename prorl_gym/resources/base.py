"""The resources server's contract: NeMo Gym's, with typed values.

The invariant: a reward is a measurement or it is None. Whatever breaks inside a grader is an EvaluationError or a
`mask_sample`, never 0.0.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prorl_gym.resources.graders import GraderPool
from prorl_gym.runtimes.base import Runtime, SandboxSpec
from prorl_gym.tools.spec import ToolReply, ToolSpec


@dataclass(frozen=True, slots=True)
class SessionStart:
    """What a session begins with.

    Attributes:
        tools: Tools of this session, beside the sandbox's.
        files: Paths relative to the working directory → content, written into the sandbox before RUN.
    """

    tools: tuple[ToolSpec, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """What an agent leaves for the grader; all of it is untrusted data.

    Attributes:
        answer: Text of the last assistant message, reasoning removed; "" when there is none.
        messages: The conversation as OpenAI chat messages, text only.
        artifacts: What `capture` named, taken out of the sandbox at the end of RUN; a missing file is left out.
        stop_reason: Why the episode ended, a `StopReason` value.
    """

    answer: str
    messages: Sequence[Mapping[str, Any]]
    artifacts: Mapping[str, bytes]
    stop_reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an episode scored.

    Attributes:
        reward: Finite, or None when it could not be measured.
        resolved: The task's own pass criterion.
        components: Named parts and detail, JSON-serialisable.
        mask_sample: True when the reward is no measurement.
        failure_kind: NeMo Gym's word for what broke, e.g. `verifier_error`.
        failure_reason: In words.
    """

    reward: float | None
    resolved: bool | None = None
    components: Mapping[str, Any] = field(default_factory=dict)
    mask_sample: bool = False
    failure_kind: str | None = None
    failure_reason: str | None = None

    def __post_init__(self) -> None:
        """Refuse what could not stand in JSON."""
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward must be finite or None, not {self.reward}")


SandboxFactory = Callable[[SandboxSpec], Runtime]
"""Makes sandboxes, not yet started, for graders that must execute code: `async with factory(spec) as runtime`."""


class GraderFactory(Protocol):
    """Makes worker processes around a grader file, confined as the service's runtime asks."""

    def __call__(
        self,
        grader: Path,
        *,
        workers: int | None = None,
        timeout_s: float = 10.0,
        memory_bytes: int | None = 2 << 30,
    ) -> GraderPool:
        """A pool, not yet started; see `GraderPool`."""
        ...


@dataclass(frozen=True, slots=True)
class ResourcesContext:
    """What the service lends a resources server."""

    name: str
    config: Mapping[str, Any]
    sandbox: SandboxFactory
    graders: GraderFactory
    state_dir: str


class ResourcesServer(ABC):
    """One environment's world: seeds sessions, serves tools, scores episodes.

    Only `verify` must be written. Methods run on the event loop: whatever blocks or runs candidate code goes to a
    grader process or a sandbox.
    """

    def __init__(self, context: ResourcesContext) -> None:
        self.context = context

    async def start(self) -> None:
        """Bring up workers, before the first session. Raises ConfigError when the configuration cannot work."""

    async def stop(self) -> None:
        """End every process it started; idempotent, bounded."""

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Refuse a row that can never be scored.

        Raises:
            RequestError: Names the missing or malformed column and what is expected.
        """

    async def seed_session(self, session_id: str, row: Mapping[str, Any]) -> SessionStart:
        """Open one episode's session."""
        return SessionStart()

    async def call_tool(self, session_id: str, name: str, arguments: Mapping[str, Any]) -> ToolReply:
        """Run one of this server's own tools."""
        return ToolReply(f"Unknown tool {name!r}.", error=True)

    def capture(self, row: Mapping[str, Any]) -> Sequence[str]:
        """Files to take out of the sandbox at the end of RUN, relative to the working directory."""
        return ()

    @abstractmethod
    async def verify(self, session_id: str, row: Mapping[str, Any], outcome: EpisodeOutcome) -> Verdict:
        """Score one episode.

        Raises:
            EvaluationError: The grader broke; the sample is masked.
        """

    async def close_session(self, session_id: str) -> None:
        """Free the session; idempotent; a seed that comes later is refused."""

    def aggregate_metrics(self, verdicts: Sequence[Verdict]) -> dict[str, float]:
        """Summary of many verdicts of one environment; masked ones do not count."""
        rewards = [v.reward for v in verdicts if v.reward is not None and not v.mask_sample]
        return {"mean_reward": sum(rewards) / len(rewards), "count": len(rewards)} if rewards else {"count": 0}
