"""EnvironmentHandler: the generic task family. An agent, a resources server, a sandbox and tools, all named in config.

The invariant: every sandbox and every session is adopted before it exists, so that whatever ends the job ends them too;
what the agent did is scored, what the infrastructure did to it is not.
"""

import asyncio
import uuid
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from prorl_gym.config.models import Environment, SandboxOverride
from prorl_gym.errors import (
    ConfigError,
    EvaluationError,
    HandlerError,
    JobError,
    RequestError,
    RuntimeStartError,
    SandboxError,
    StageTimeout,
)
from prorl_gym.handlers.base import AgentHandler, EvalOutput, HandlerContext, Job, Prepared, RunOutput
from prorl_gym.handlers.sandbox_spec import row_image, sandbox_spec
from prorl_gym.handlers.transcript import chat_transcript, last_answer
from prorl_gym.resources.base import EpisodeOutcome, ResourcesContext, ResourcesServer, SessionStart, Verdict
from prorl_gym.resources.confine import Confinement
from prorl_gym.resources.graders import GraderPool
from prorl_gym.rollout.agent import Agent, AgentContext
from prorl_gym.rollout.episode import Episode
from prorl_gym.rollout.loading import load_class
from prorl_gym.rollout.toolbox import AGENT_TOOLS, Toolbox
from prorl_gym.runtimes.base import Runtime
from prorl_gym.runtimes.bubblewrap import bubblewrap_program
from prorl_gym.tools.sandbox import SANDBOX_TOOLS
from prorl_gym.tools.web.specs import WEB_TOOLS
from prorl_gym.types import JobRequest, StopReason

MAX_ARTIFACT_BYTES = 16 << 20
CLOSE_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 10.0


class AgentFailed(HandlerError):
    """The agent's own code raised: the episode is scored as far as it got."""

    kind = "agent"
    infrastructure = False


class Session:
    """One job's session with the resources server, and what is known of the job; stopped when the job ends."""

    def __init__(self, job_id: str, resources: ResourcesServer | None) -> None:
        self.id = f"{job_id}-{uuid.uuid4().hex[:8]}"
        self.start = SessionStart()
        self.runtime: Runtime | None = None
        self.provenance: dict[str, Any] = {}
        self._resources = resources

    async def stop(self) -> None:
        """Close it; also one whose seeding was cut short."""
        if self._resources is not None:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._resources.close_session(self.id)


class EnvironmentHandler(AgentHandler):
    """Serves one environment of the configuration, the one that is named like its task."""

    def __init__(self, context: HandlerContext) -> None:
        super().__init__(context)
        self._environment = _environment(context)
        config = self._environment.agent
        self._sandbox = config.sandbox
        self._max_turns = min(config.max_turns, config.max_steps or config.max_turns)
        _check_tools(self._environment, context)
        self._base_tools = Toolbox(context.config.tool, config.tools).specs
        self._agent = self._load_agent()
        self._resources = self._load_resources()
        self._sessions: dict[str, Session] = {}

    async def start(self) -> None:
        """Start the resources server."""
        if self._resources is None:
            return
        try:
            await self._resources.start()
        except BaseException:
            await self._resources.stop()
            raise

    async def stop(self) -> None:
        """Stop the resources server."""
        if self._resources is not None:
            await self._resources.stop()

    def check(self, request: JobRequest) -> None:
        """Refuse a row that asks nothing, cannot be scored, or names a tool or an image that it may not have."""
        row = request.instance
        try:
            self._agent.first_messages(row, self._base_tools)
            if self._resources is not None:
                self._resources.check_row(row)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"the row cannot be read: {type(error).__name__}: {error}", field="instance") from error
        self._check_row_tools(row)
        if self._sandbox is not None:
            row_image(row, self.context.config.images.allow)

    async def init(self, job: Job) -> Prepared:
        """Seed the session, start the sandbox, put the session's files and the configured setup into it."""
        session = self._sessions[job.id] = Session(job.id, self._resources)
        job.adopt(_Forget(self._sessions, job.id, session), until="end")
        if self._resources is not None:
            session.start = await self._resources.seed_session(session.id, job.request.instance)
        if self._sandbox is None:
            if session.start.files:
                raise HandlerError("the session brings files, and the agent has no sandbox to put them into")
            return Prepared(metadata=session)
        spec = sandbox_spec(self.context.config, self._sandbox, job.request.instance, job_id=job.id)
        runtime = session.runtime = self.context.sandbox(spec)
        job.adopt(runtime)
        await runtime.start()
        described = runtime.describe()
        session.provenance["sandbox"] = {
            "kind": described.kind,
            "image": described.image,
            "image_digest": described.image_digest,
        }
        for path, content in session.start.files.items():
            await runtime.copy_in(content, _relative(path))
        await self._set_up(runtime, self._sandbox)
        return Prepared(runtime=runtime, metadata=session)

    async def run(self, job: Job, prepared: Prepared) -> RunOutput:
        """Let the agent act, then take out of the sandbox what scoring needs."""
        session: Session = prepared.metadata
        policy = self.context.policy(job.request.policy)
        renderer = await policy.renderer(job.waiting)
        failure: AgentFailed | None = None
        async with policy.session(job.id, job.waiting) as llm:
            episode = Episode(
                job.request.instance,
                recorder=job.recorder,
                renderer=renderer,
                session=llm,
                toolbox=Toolbox(
                    self.context.config.tool,
                    self._environment.agent.tools,
                    runtime=session.runtime,
                    resources=self._resources,
                    session_id=session.id,
                    session_tools=session.start.tools,
                    web=self.context.web,
                ),
                sampling=job.request.sampling_params,
                defaults=self.context.config.policy.sampling,
                max_turns=self._max_turns,
                emit=job.emit,
            )
            session.provenance |= episode.provenance()
            try:
                stop = StopReason(await self._agent.run(episode))
            except JobError:
                raise
            except Exception as error:  # noqa: BLE001 - the agent's own code, classified here
                stop, failure = StopReason.ERROR, AgentFailed(f"agent {self._environment.agent_type}: {error!r}")
                failure.__cause__ = error
        answer = last_answer(job.recorder) if episode.submitted is None else episode.submitted
        artifacts = await self._capture(job, session)
        return RunOutput(stop, answer=answer, artifacts=artifacts, metadata=session, error=failure)

    async def run_exception(self, job: Job, error: Exception) -> RunOutput | None:
        """An episode that ran out of time may be scored all the same: take out what there is."""
        if not isinstance(error, StageTimeout) or self.context.config.pipeline.on_run_timeout != "evaluate":
            return None
        artifacts = await self._capture(job, self._sessions[job.id])
        return RunOutput(StopReason.TIMEOUT, answer=last_answer(job.recorder), artifacts=artifacts, error=error)

    async def eval(self, job: Job, run_output: RunOutput) -> EvalOutput:
        """Have the resources server score the episode, unless the infrastructure broke it."""
        session = self._sessions[job.id]
        if self._resources is None or _is_no_measurement(run_output.error):
            return EvalOutput(None, masked=True)
        outcome = EpisodeOutcome(
            answer=run_output.answer,
            messages=chat_transcript(job.recorder),
            artifacts=run_output.artifacts,
            stop_reason=run_output.stop_reason.value,
        )
        try:
            verdict = await self._resources.verify(session.id, job.request.instance, outcome)
        except JobError:
            raise
        except Exception as error:
            raise EvaluationError(f"resources server {self._environment.resources_type}: {error!r}") from error
        if not isinstance(verdict, Verdict):
            raise EvaluationError(f"verify returned {type(verdict).__name__}, not Verdict")
        return EvalOutput(
            verdict.reward,
            resolved=verdict.resolved,
            components=verdict.components,
            masked=verdict.mask_sample,
            failure_kind=verdict.failure_kind,
            failure_reason=verdict.failure_reason,
        )

    async def final_result(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        """Add where the tokens came from."""
        session = self._sessions.get(job.id)
        if session is not None:
            result["provenance"] = {**result.get("provenance", {}), **session.provenance}
        return result

    def _load_agent(self) -> Agent:
        environment, roots = self._environment, self.context.config.roots
        agent_class, folder = load_class(
            roots,
            "agents",
            environment.agent_type,
            environment.agent.entrypoint,
            Agent,  # type: ignore[type-abstract]
        )
        return agent_class(AgentContext(environment.name, environment.agent, folder))

    def _load_resources(self) -> ResourcesServer | None:
        environment, config = self._environment, self.context.config
        settings = environment.resources
        if settings is None or environment.resources_type is None:
            return None
        if settings.url is not None:
            raise ConfigError(f"{environment.resources_name}: `url`: only resources servers in process are served yet")
        server_class, _ = load_class(
            config.roots,
            "resources_servers",
            environment.resources_type,
            settings.entrypoint,
            ResourcesServer,  # type: ignore[type-abstract]
        )
        return server_class(
            ResourcesContext(
                name=environment.resources_name or environment.resources_type,
                config=settings.own_fields,
                sandbox=self.context.sandbox,
                graders=self._make_graders,
                state_dir=str(config.paths.state),
            )
        )

    def _make_graders(self, grader: Path, **options: Any) -> GraderPool:
        own = self._sandbox.runtime if self._sandbox is not None else None
        config = self.context.config
        bare = (own or config.runtime.kind) == "local"
        return GraderPool(grader, None if bare else Confinement(bubblewrap_program(config.paths.state)), **options)

    def _check_row_tools(self, row: Mapping[str, Any]) -> None:
        """A row may list tools in NeMo Gym's manner; each must be one that this task has."""
        params = row.get("responses_create_params")
        listed = params.get("tools") if isinstance(params, Mapping) else None
        if not listed or (
            self._resources is not None and type(self._resources).call_tool is not ResourcesServer.call_tool
        ):
            return  # a resources server with tools of its own judges them in check_row
        field = "instance.responses_create_params.tools"
        known = [spec.name for spec in self._base_tools]
        for index, tool in enumerate(listed if isinstance(listed, list) else [listed]):
            described = tool.get("function", tool) if isinstance(tool, Mapping) else None
            name = described.get("name") if isinstance(described, Mapping) else None
            if name not in known:
                raise RequestError(
                    f"unknown tool {name!r}; this task has {', '.join(known) or 'none'}", field=f"{field}[{index}]"
                )

    async def _set_up(self, runtime: Runtime, sandbox: SandboxOverride) -> None:
        for command in sandbox.setup:
            reply = await runtime.call("bash", {"command": command}, timeout_s=self.context.config.tool.max_timeout_s)
            if reply.timed_out or reply.exit_code != 0:
                how = "ran over its time" if reply.timed_out else f"ended with {reply.exit_code}"
                raise RuntimeStartError(f"setup command {command!r} {how}: {reply.text[-2000:]}")
        await runtime.seal()

    async def _capture(self, job: Job, session: Session) -> dict[str, bytes]:
        """The files that scoring needs. One that the agent made unreadable is missing, like one that it never wrote."""
        captured: dict[str, bytes] = {}
        runtime = session.runtime
        if runtime is None or self._resources is None:
            return captured
        for path in self._resources.capture(job.request.instance):
            try:
                captured[path] = await runtime.copy_out(_relative(path), max_bytes=MAX_ARTIFACT_BYTES)
            except FileNotFoundError:
                continue
            except SandboxError as error:
                await runtime.call("bash", {"command": ":"}, timeout_s=PROBE_TIMEOUT_S)  # raises if it is the sandbox
                job.warn(f"not captured: {error}")
        return captured


class _Forget:
    """Closes a job's session and lets go of it."""

    def __init__(self, sessions: dict[str, Session], job_id: str, session: Session) -> None:
        self._sessions, self._job_id, self._session = sessions, job_id, session

    async def stop(self) -> None:
        self._sessions.pop(self._job_id, None)
        await self._session.stop()


def _environment(context: HandlerContext) -> Environment:
    for environment in context.config.environments:
        if environment.name == context.task:
            return environment
    raise ConfigError(f"no environment {context.task!r} in the configuration")


def _check_tools(environment: Environment, context: HandlerContext) -> None:
    for name in environment.agent.tools:
        if name not in AGENT_TOOLS:
            raise ConfigError(f"{environment.name}: tools: unknown tool {name!r}; known: {', '.join(AGENT_TOOLS)}")
        if name in SANDBOX_TOOLS and environment.agent.sandbox is None:
            raise ConfigError(f"{environment.name}: tools: {name} needs a sandbox, and `sandbox` is null")
        if name in WEB_TOOLS and context.web is None:
            raise ConfigError(f"{environment.name}: tools: {name} is not available in this service")


def _is_no_measurement(error: Exception | None) -> bool:
    """True when RUN broke for a reason that is not the agent's; running out of time is the agent's."""
    return isinstance(error, JobError) and error.infrastructure and not isinstance(error, StageTimeout)


def _relative(path: str) -> str:
    """`path` itself, which the sandbox takes from its working directory.

    Raises:
        HandlerError: It leads out of it.
    """
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise HandlerError(f"{path!r} must be relative to the working directory and stay in it")
    return path
