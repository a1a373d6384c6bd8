"""The one multi-turn loop."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prorl_gym.rollout.toolbox import fingerprint
from prorl_gym.tokens.records import ChatMessage
from prorl_gym.types import StopReason

if TYPE_CHECKING:
    from prorl_gym.rollout.episode import Episode

LOOP_LIMIT = 5
"""So many turns in a row with the same calls and the same observations are a loop."""


async def run_loop(episode: "Episode", messages: Sequence[ChatMessage], *, agent: str = "main") -> StopReason:
    """Let the policy act until it answers, submits, or a limit ends the episode.

    Cancelling at any point leaves the record whole and asks the policy for nothing more.

    Raises:
        JobError: The policy's backends, the sandbox or the environment broke; what was recorded stays.
    """
    conversation = episode.converse(messages, agent=agent)
    last, repeats = None, 0
    while episode.turns < episode.max_turns:
        turn = await conversation.sample()
        if turn.stop is not None:
            return turn.stop
        if not turn.requests:
            return StopReason.ANSWERED
        observed = await episode.act(turn.requests, conversation)
        if observed.stop is not None:
            return observed.stop
        current = (*map(fingerprint, turn.requests), *observed.texts)
        last, repeats = current, repeats + 1 if current == last else 1
        if repeats >= LOOP_LIMIT:
            return StopReason.LOOP
    return StopReason.MAX_TURNS
