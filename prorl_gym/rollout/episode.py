"""One agent's way through one task: the row, the tools, the policy, and the record of it all."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from prorl_gym.backends.base import LlmSession
from prorl_gym.config.models import SamplingDefaults
from prorl_gym.rollout.budget import context_budget, generate_params
from prorl_gym.rollout.conversation import Conversation
from prorl_gym.rollout.toolbox import Toolbox
from prorl_gym.tokens.base import ChatRenderer
from prorl_gym.tokens.recorder import Recorder
from prorl_gym.tokens.records import ChatMessage, ToolRequest
from prorl_gym.tools.spec import ToolReply, ToolSpec
from prorl_gym.tools.submit import SUBMIT
from prorl_gym.types import SamplingParams, StopReason

ENDED = "Not run: the episode had already ended."


class Emit(Protocol):
    """Where progress goes; see `Job.emit`."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Publish one event."""
        ...


@dataclass(frozen=True, slots=True)
class Observed:
    """What the tool calls of one turn gave.

    Attributes:
        texts: One observation per call, in order, as the model will read it.
        stop: Set when one of them ended the episode.
    """

    texts: tuple[str, ...]
    stop: StopReason | None


class Episode:
    """What an agent's loop works with. One instance per job; its state is the record.

    Attributes:
        row: The untrusted data row.
        tools: What the model is shown.
        recorder: Append-only; survives whatever ends the episode.
        turns: Model calls so far, of all agents.
        max_turns: Their bound.
    """

    def __init__(
        self,
        row: Mapping[str, Any],
        *,
        recorder: Recorder,
        renderer: ChatRenderer,
        session: LlmSession,
        toolbox: Toolbox,
        sampling: SamplingParams,
        defaults: SamplingDefaults,
        max_turns: int,
        emit: Emit = lambda event, **fields: None,
    ) -> None:
        self.row = row
        self.recorder = recorder
        self.renderer = renderer
        self.session = session
        self.sampling = sampling
        self.defaults = defaults
        self.max_turns = min(max_turns, sampling.max_turns or max_turns)
        self.budget = context_budget(sampling, defaults, session.max_model_len)
        self.emit = emit
        self.submitted: str | None = None
        self.tools: Sequence[ToolSpec] = toolbox.specs
        self.schemas = [spec.schema() for spec in self.tools]
        self._toolbox = toolbox
        recorder.set_tools(self.schemas)

    @property
    def turns(self) -> int:
        """Model calls so far, of all agents."""
        return self.recorder.num_turns

    def provenance(self) -> dict[str, Any]:
        """Whose tokens these are and how they are sampled, JSON-serialisable."""
        params = generate_params(self.sampling, self.defaults, max_tokens=self.budget.max_tokens, stop_token_ids=())
        return {
            "model": self.session.model,
            "renderer": self.renderer.name,
            "tokenizer_digest": self.renderer.digest(),
            "sampling": {**asdict(params), "max_model_len": self.budget.max_model_len, "max_turns": self.max_turns},
        }

    def converse(self, messages: Sequence[ChatMessage], *, agent: str = "main") -> Conversation:
        """Open a conversation; each has token segments of its own."""
        conversation = Conversation(self, agent)
        conversation.observe(*messages)
        return conversation

    async def act(self, requests: Sequence[ToolRequest], conversation: Conversation) -> Observed:
        """Answer the tool calls of one turn, in order; each observation is recorded as soon as it is there.

        Raises:
            SandboxError: The sandbox broke; what was observed before stays recorded.
            HandlerError: The resources server's tool raised.
        """
        texts: list[str] = []
        stop: StopReason | None = None
        for request in requests:
            reply = ToolReply(ENDED, error=True) if stop is not None else await self._toolbox.call(request)
            text = self._fitting(reply.text)
            conversation.observe(ChatMessage("tool", text, tool_call_id=request.id, name=request.name))
            texts.append(text)
            self.emit(
                "tool",
                turn=self.turns,
                agent=conversation.agent,
                name=request.name,
                error=reply.error,
                timed_out=reply.timed_out,
                duration_s=reply.duration_s,
            )
            if reply.done and stop is None:
                stop = self._end(request)
        return Observed(tuple(texts), stop)

    def _end(self, request: ToolRequest) -> StopReason:
        if request.name != SUBMIT.name:
            return StopReason.ENVIRONMENT_DONE
        self.submitted = (request.arguments or {}).get("answer")
        return StopReason.SUBMITTED

    def _fitting(self, text: str) -> str:
        """`text` clipped to what one observation may take in the prompt; a byte is a token at most."""
        limit = self._toolbox.config.observation_tokens
        return text if len(text) * 4 <= limit else self.renderer.clip(text, limit)
