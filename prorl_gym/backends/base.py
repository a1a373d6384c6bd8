"""Inference endpoints: what a dialect must do, and what an episode may ask of the policy."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from prorl_gym.errors import BackendError
from prorl_gym.tokens.records import GenerateParams, Generation

Waiting = Callable[[str], AbstractAsyncContextManager[None]]
"""`async with waiting("for a backend"):` stops the job's timer for as long as the wait lasts."""


class Unreachable(BackendError):
    """No connection came about: refused, timed out, or the name does not resolve. The engine saw nothing."""


class ContradictoryReply(BackendError):
    """The engine answered, but its reply contradicts itself, our request or its dialect. Nothing of it is kept."""


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """What a probe found out about an endpoint; None where it does not say."""

    model: str | None
    max_model_len: int | None


class Dialect(ABC):
    """How to talk to one kind of engine at one address. Safe for many calls at once; holds no job's state."""

    name: str

    @abstractmethod
    async def probe(self) -> BackendFacts:
        """Ask the engine what it is.

        Raises:
            BackendError: It does not answer, or not in this dialect.
        """

    @abstractmethod
    async def healthy(self) -> bool:
        """True when the engine answers its health check within a few seconds; never raises."""

    @abstractmethod
    async def generate(self, prompt_ids: Sequence[int], params: GenerateParams, *, model: str) -> Generation:
        """Sample one continuation. Cancelling closes the connection, which aborts the request at the engine.

        `versions` of the result holds what the engine itself reports, and is empty where it reports none.

        Raises:
            Unreachable: No connection.
            ContradictoryReply: Ids, logprobs, usage or spans disagree, or a number is none.
            BackendError: Refused, broke off or over its deadline. `retryable` is False when the request itself is at
                fault, or the deadline has passed.
        """


class LlmSession(Protocol):
    """One job's way to its policy: sticky to one backend, counted while it lives."""

    @property
    def model(self) -> str:
        """Model name as the backend knows it."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """The engine's context length, prompt and sampled tokens together; None where it does not say."""
        ...

    async def generate(self, prompt_ids: Sequence[int], params: GenerateParams) -> Generation:
        """Sample from the policy; waits for a backend with the job's timer paused, up to `backend.wait_s`.

        Raises:
            BackendError: No backend came, or every one tried failed.
        """
        ...
