"""One agent's conversation with the policy: what it has seen, and the next call on top of it.

The invariant: every prompt is rendered on the ids of the call before, and a call is in the record before anything
looks at what it says. A cancel in between leaves a record that ends with the last whole call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prorl_gym.daemon_thread import in_daemon_thread
from prorl_gym.errors import BackendError
from prorl_gym.rollout.budget import generate_params
from prorl_gym.tokens.body import without_surrogates
from prorl_gym.tokens.records import ChatMessage, Rendered, ToolRequest
from prorl_gym.types import StopReason

if TYPE_CHECKING:
    from prorl_gym.rollout.episode import Episode

LONG_CHARACTERS = 100_000
"""New text from which on a prompt is rendered in a thread: on the event loop it would hold up every other job."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call's outcome.

    Attributes:
        message: What the policy said; None when the context left no room to ask.
        stop: Why the episode cannot go on after it: the generation was cut, or never began.
    """

    message: ChatMessage | None
    stop: StopReason | None = None

    @property
    def requests(self) -> tuple[ToolRequest, ...]:
        """The tool calls in it, malformed ones too; none of a turn that was cut."""
        return () if self.message is None or self.stop is not None else self.message.tool_requests


class Conversation:
    """Grows by what is observed and by what the policy samples."""

    def __init__(self, episode: "Episode", agent: str) -> None:
        self.agent = agent
        self.history: list[ChatMessage] = []
        self._episode = episode
        self._seen = 0
        self._prompt_ids: Sequence[int] = ()
        self._output_ids: Sequence[int] = ()

    def observe(self, *messages: ChatMessage) -> None:
        """Add messages that the policy did not write; the next call shows them to it, all in one prompt."""
        clean = [replace(m, content=without_surrogates(m.content)) for m in messages]
        self.history.extend(clean)
        self._episode.recorder.add_messages(clean, agent=self.agent)

    async def sample(self) -> Turn:
        """Ask the policy for its next turn.

        Raises:
            BackendError: No backend answered within its contract.
        """
        episode = self._episode
        new = sum(len(message.content) for message in self.history[self._seen :])
        if not episode.budget.may_hold(new):
            return Turn(None, StopReason.CONTEXT_EXHAUSTED)
        prompt = self._render() if new < LONG_CHARACTERS else await in_daemon_thread(self._render)
        room = episode.budget.room(len(prompt.ids))
        if room == 0:
            return Turn(None, StopReason.CONTEXT_EXHAUSTED)
        params = generate_params(
            episode.sampling, episode.defaults, max_tokens=room, stop_token_ids=episode.renderer.stop_token_ids
        )
        generation = await episode.session.generate(prompt.ids, params)
        prompt_ids = prompt.ids if generation.prompt_ids is None else generation.prompt_ids
        parsed = episode.renderer.parse(generation.output_ids, prompt_ids, turn=episode.turns)
        episode.recorder.add_call(prompt, generation, parsed, agent=self.agent)
        self.history.append(parsed.message)
        self._seen, self._prompt_ids, self._output_ids = len(self.history), prompt_ids, generation.output_ids
        episode.emit(
            "turn",
            turn=episode.turns,
            agent=self.agent,
            prompt_tokens=len(prompt_ids),
            sampled_tokens=len(generation.output_ids),
            finish_reason=generation.finish_reason,
            tool_calls=len(parsed.message.tool_requests),
        )
        if generation.finish_reason == "abort":
            raise BackendError(f"{generation.backend} broke the generation off and nothing continued it")
        if generation.finish_reason == "length" and not parsed.complete:
            whole = len(generation.output_ids) >= episode.budget.max_tokens
            return Turn(parsed.message, StopReason.MAX_TOKENS if whole else StopReason.CONTEXT_EXHAUSTED)
        return Turn(parsed.message)

    def _render(self) -> Rendered:
        episode = self._episode
        thinking = episode.sampling.enable_thinking
        if self._seen == 0:
            return episode.renderer.start(self.history, episode.schemas, enable_thinking=thinking)
        return episode.renderer.extend(
            self.history[: self._seen],
            self._prompt_ids,
            self._output_ids,
            self.history[self._seen :],
            episode.schemas,
            enable_thinking=thinking,
        )
