"""Where one episode's tool calls go: into the sandbox, to the web, to the resources server, or to an end.

The invariant: whatever the model writes gets an observation. Only a broken sandbox or environment raises.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prorl_gym.config.models import ToolConfig
from prorl_gym.errors import HandlerError, JobError
from prorl_gym.resources.base import ResourcesServer
from prorl_gym.runtimes.base import Runtime
from prorl_gym.tokens.records import ToolRequest
from prorl_gym.tools.sandbox import HOST_NETWORK_TOOLS, SANDBOX_TOOLS, check_arguments
from prorl_gym.tools.spec import ToolReply, ToolSpec
from prorl_gym.tools.submit import SUBMIT
from prorl_gym.tools.web.specs import WEB_TOOLS
from prorl_gym.tools.web.tools import WebTools

AGENT_TOOLS = {**SANDBOX_TOOLS, **WEB_TOOLS, SUBMIT.name: SUBMIT}
"""What an agent's `tools` may name."""
MAX_REPLY_CHARACTERS = 64_000
"""Of a resources server's tool, before its tokens are counted; a sandbox bounds its own."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one episode.

    Attributes:
        names: Of the agent's own tools: the sandbox's, the web's and `submit`.
        session_tools: Of the resources server, for this session; a name of the agent's own wins.
    """

    config: ToolConfig
    names: Sequence[str] = ()
    runtime: Runtime | None = None
    resources: ResourcesServer | None = None
    session_id: str = ""
    session_tools: Sequence[ToolSpec] = ()
    web: WebTools | None = None
    _specs: dict[str, ToolSpec] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Line the specs up: the agent's own first."""
        tools = AGENT_TOOLS
        if self.runtime is not None and self.runtime.spec.network == "host":
            tools = tools | HOST_NETWORK_TOOLS
        own = (tools[name] for name in self.names)
        for spec in (*own, *self.session_tools):
            self._specs.setdefault(spec.name, spec)

    @property
    def specs(self) -> list[ToolSpec]:
        """What the model is shown."""
        return list(self._specs.values())

    async def call(self, request: ToolRequest) -> ToolReply:
        """Answer one call as the model wrote it.

        Raises:
            SandboxError: The sandbox broke.
            HandlerError: The resources server's tool raised.
        """
        refusal = self._refusal(request)
        if refusal is not None:
            return ToolReply(refusal, error=True)
        arguments = request.arguments or {}
        if request.name not in self.names:
            return await self._ask_resources(request.name, arguments)
        if request.name == SUBMIT.name:
            return ToolReply("Submitted.", done=True)
        if request.name in WEB_TOOLS:
            assert self.web is not None, "an agent names web tools only where the service has them"  # noqa: S101
            return await self.web.call(request.name, arguments)
        assert self.runtime is not None, "an agent without a sandbox names no sandbox tool"  # noqa: S101
        return await self.runtime.call(request.name, arguments, timeout_s=self._timeout_s(request.name, arguments))

    def _refusal(self, request: ToolRequest) -> str | None:
        """Why a call does not run, in words for the model."""
        if request.arguments is None:
            return request.error or "Malformed tool call: the arguments must be one JSON object."
        spec = self._specs.get(request.name)
        if spec is None:
            return f"Unknown tool {request.name!r}. Tools: {', '.join(self._specs) or 'none'}."
        return check_arguments(spec, request.arguments)

    def _timeout_s(self, name: str, arguments: Mapping[str, Any]) -> float:
        configured = {
            "bash": self.config.bash_timeout_s,
            "ipython": self.config.ipython_timeout_s,
            "file_editor": self.config.file_editor_timeout_s,
        }
        asked = arguments.get("timeout_s")
        wanted = float(asked) if isinstance(asked, int | float) and asked > 0 else configured[name]
        return min(wanted, self.config.max_timeout_s)

    async def _ask_resources(self, name: str, arguments: Mapping[str, Any]) -> ToolReply:
        assert self.resources is not None, "only a resources server brings session tools"  # noqa: S101
        timeout_s = self.config.max_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                reply = await self.resources.call_tool(self.session_id, name, arguments)
        except TimeoutError as error:
            if not deadline.expired():
                raise HandlerError(f"tool {name!r} of the resources server raised: {error!r}") from error
            return ToolReply(f"{name} did not answer within {timeout_s:g} s.", error=True, timed_out=True)
        except JobError:
            raise
        except Exception as error:
            raise HandlerError(f"tool {name!r} of the resources server raised: {error!r}") from error
        return reply if len(reply.text) <= MAX_REPLY_CHARACTERS else _shortened(reply)


def _shortened(reply: ToolReply) -> ToolReply:
    half = MAX_REPLY_CHARACTERS // 2
    left_out = len(reply.text) - 2 * half
    text = f"{reply.text[:half]}\n[... {left_out} characters left out ...]\n{reply.text[-half:]}"
    return ToolReply(text, reply.error, reply.timed_out, reply.done, reply.exit_code, reply.duration_s, reply.details)


def fingerprint(request: ToolRequest) -> str:
    """What makes two calls the same one, their ids aside."""
    return json.dumps([request.name, request.arguments, request.error], sort_keys=True, default=str)
