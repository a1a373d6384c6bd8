"""One job's way to its policy: retries, moves and continuations of a single model call, each of them on record.

Invariant: what one call returns was sampled exactly once. A reply that contradicts itself is dropped as a whole; the
partial one of an engine that aborted is kept, and sampling goes on after its last id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prorl_gym.backends.backend import Backend, CallCut
from prorl_gym.backends.base import ContradictoryReply, Unreachable, Waiting
from prorl_gym.backends.patience import Patience
from prorl_gym.errors import BackendError
from prorl_gym.tokens.records import GenerateParams, Generation, VersionSpan

if TYPE_CHECKING:
    from prorl_gym.backends.pool import BackendPool


@dataclass(slots=True, eq=False)
class Task:
    """One task in the pool.

    Attributes:
        backend: Where it stays; None until it was assigned.
        served_by: Address of its last call, to record a move.
        sessions: How many are open; the task ends with the last.
    """

    backend: Backend | None = None
    served_by: str | None = None
    sessions: int = 0


class PoolSession:
    """The `LlmSession` of a pool; serves any number of calls at once."""

    def __init__(self, pool: "BackendPool", task: Task, waiting: Waiting, unhealthy_wait_s: float) -> None:
        self._pool = pool
        self._task = task
        self._waiting = waiting
        self._unhealthy_wait_s = unhealthy_wait_s

    @property
    def model(self) -> str:
        """Model name as the task's backend knows it."""
        return (self._task.backend.model if self._task.backend else None) or ""

    @property
    def max_model_len(self) -> int | None:
        """Context length of the task's backend; None where it does not say."""
        facts = self._task.backend.facts if self._task.backend else None
        return facts.max_model_len if facts else None

    async def assign(self) -> None:
        """Wait for a backend, see `generate`."""
        await self._pool.backend_for(self._task, self._waiting, Patience(self._unhealthy_wait_s))

    async def generate(self, prompt_ids: Sequence[int], params: GenerateParams) -> Generation:
        """See `LlmSession.generate`. Cancelling closes the connection to the engine."""
        progress = _Progress(list(prompt_ids), params)
        patience = Patience(self._unhealthy_wait_s)
        avoid: set[str] = set()
        contradicted = False
        while True:
            backend = await self._pool.backend_for(self._task, self._waiting, patience, avoid)
            self._note_move(progress, backend.address)
            try:
                with self._pool.counted_call():
                    part = await backend.generate(progress.prompt_ids, progress.params)
            except CallCut as error:
                progress.note(backend, error)
            except ContradictoryReply as error:
                progress.note(backend, error)
                if contradicted:
                    raise progress.failure() from error
                contradicted = True
            except BackendError as error:
                progress.note(backend, error)
                backend.failed(str(error), unreachable=isinstance(error, Unreachable))
                if not error.retryable:
                    raise progress.failure() from error
                avoid.add(backend.address)
                if self._pool.has_other(avoid):
                    patience.check(progress.failure())
                else:
                    avoid.clear()
                    await patience.back_off(progress.failure())
            else:
                progress.add(part)
                if part.finish_reason != "abort" or progress.full:
                    return progress.generation()
                progress.note(backend, f"aborted by the engine after {len(part.output_ids)} tokens")
                if part.output_ids:
                    patience.progress()
                else:
                    await patience.back_off(progress.failure())

    def _note_move(self, progress: "_Progress", address: str) -> None:
        before, self._task.served_by = self._task.served_by, address
        if before not in (None, address):
            progress.retries.append(f"moved from {before} to {address}")


class _Progress:
    """What one call has so far: partial replies in order, and the story of what failed."""

    def __init__(self, prompt_ids: list[int], params: GenerateParams) -> None:
        self._first_prompt = prompt_ids
        self._first_params = params
        self._parts: list[Generation] = []
        self._sampled: list[int] = []
        self.prompt_ids = prompt_ids
        self.params = params
        self.retries: list[str] = []

    @property
    def full(self) -> bool:
        """True when the partial replies use up `max_tokens`."""
        return len(self._sampled) >= self._first_params.max_tokens

    def note(self, backend: Backend, what: BackendError | str) -> None:
        self.retries.append(f"{backend.address}: {what}")

    def failure(self) -> BackendError:
        """The last thing that went wrong, with how often something did before."""
        earlier = len(self.retries) - 1
        story = f" (after {earlier} earlier failures and moves, first {self.retries[0]})" if earlier else ""
        return BackendError(f"{self.retries[-1]}{story}", retryable=False)

    def add(self, part: Generation) -> None:
        """Keep a reply; the next attempt, if there is one, samples after it."""
        self._parts.append(part)
        if part.finish_reason == "abort" and part.output_ids:
            self._sampled += part.output_ids
            self.prompt_ids = self._first_prompt + self._sampled
            seed = self._first_params.seed
            self.params = replace(
                self._first_params,
                max_tokens=max(1, self._first_params.max_tokens - len(self._sampled)),
                seed=None
                if seed is None
                else seed + len(self._sampled),  # the same one would draw the same noise again
            )

    def generation(self) -> Generation:
        """All replies as one."""
        last = self._parts[-1]
        if len(self._parts) == 1 and not self.retries and last.finish_reason != "abort":
            return last
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[VersionSpan] = []
        for part in self._parts:
            for span in part.versions:
                start, end = span.start + len(ids), span.end + len(ids)
                if versions and versions[-1].version == span.version:
                    start = versions.pop().start
                versions.append(VersionSpan(start, end, span.version))
            ids += part.output_ids
            logprobs += part.logprobs
        return replace(
            last,
            output_ids=ids,
            logprobs=logprobs,
            finish_reason="length" if last.finish_reason == "abort" else last.finish_reason,
            versions=tuple(versions),
            prompt_ids=self._parts[0].prompt_ids,
            latency_s=sum(part.latency_s for part in self._parts),
            retries=tuple(self.retries),
        )
