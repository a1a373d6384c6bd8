"""The service over HTTP: its life, its pools, its backends, what it offers and how it fares."""

from dataclasses import asdict
from typing import Any

from starlette.responses import Response

from prorl_gym.errors import NotRunning, RequestError
from prorl_gym.server.answers import JsonAnswer
from prorl_gym.server.bodies import (
    AddLlmServer,
    ClearLlmServer,
    EnvironmentList,
    PoolSizes,
    Removed,
    RemoveLlmServer,
    State,
    StopBody,
)
from prorl_gym.server.metrics import Metrics
from prorl_gym.server.operation import Description, Operation
from prorl_gym.server.service import Service
from prorl_gym.types import LlmServer, ServerStatus


class ControlRoutes:
    """Endpoints about everything but jobs. `operations` lists them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._metrics = Metrics(service)
        body_errors = (400, 401, 413, 415)
        self.operations = (
            Operation("POST", "/add_llm_server", self.add_llm_server, Description(
                "Register an inference endpoint", "backends", LlmServer, errors=body_errors)),
            Operation("POST", "/clear_llm_server", self.clear_llm_server, Description(
                "Take all endpoints of a policy away", "backends", list[LlmServer], errors=body_errors)),
            Operation("POST", "/remove_llm_server", self.remove_llm_server, Description(
                "Take one endpoint away", "backends", Removed, errors=body_errors)),
            Operation("GET", "/llm_servers", self.llm_servers, Description(
                "The registered endpoints", "backends", list[LlmServer], errors=(401,))),
            Operation("POST", "/start", self.start, Description(
                "Start the pools", "service", State, errors=(401, 503))),
            Operation("POST", "/stop", self.stop, Description(
                "Stop the pools, or the process", "service", State, errors=body_errors)),
            Operation("PATCH", "/pools", self.resize, Description(
                "Resize the pools while they work", "service", dict[str, Any], errors=body_errors)),
            Operation("GET", "/status", self.status, Description(
                "Counts and occupancies", "service", ServerStatus, errors=(401,))),
            Operation("GET", "/environments", self.environments, Description(
                "What jobs may ask for", "service", EnvironmentList, errors=(401,))),
            Operation("GET", "/health", self.health, Description(
                "Is the process alive; needs no token", "service", State)),
            Operation("GET", "/ready", self.ready, Description(
                "Do the pools run", "service", State, errors=(401, 503))),
            Operation("GET", "/metrics", self.metrics, Description(
                "Prometheus metrics", "service", None, errors=(401,), media_type="text/plain")),
        )  # fmt: skip

    async def add_llm_server(self, body: AddLlmServer) -> Response:
        """Register an engine for a policy; the same address again updates its version.

        An endpoint that does not answer is kept as unhealthy and checked again; the answer says so. Tasks wait, their
        timers paused, until a policy has its first endpoint.
        """
        return JsonAnswer((await self._service.add_llm_server(body)).model_dump())

    async def clear_llm_server(self, body: ClearLlmServer = ClearLlmServer()) -> Response:  # noqa: B008 (frozen)
        """Take all endpoints of a policy away, before new weights are loaded say; gives those that were there."""
        cleared = await self._service.clear_llm_server(body)
        return JsonAnswer([server.model_dump() for server in cleared])

    async def remove_llm_server(self, body: RemoveLlmServer) -> Response:
        """Take one endpoint away; its tasks move to another one, or wait for one."""
        return JsonAnswer({"removed": await self._service.remove_llm_server(body)})

    async def llm_servers(self) -> Response:
        """Every registered endpoint of every policy, healthy or not."""
        return JsonAnswer([server.model_dump() for server in self._service.llm_servers()])

    async def start(self) -> Response:
        """Start the pools; harmless when they run."""
        await self._service.start_pools()
        return self._state()

    async def stop(self, body: StopBody = StopBody()) -> Response:  # noqa: B008 (frozen)
        """End all jobs and sandboxes; the process, the endpoints and the results stay, `/start` begins again.

        With `drain` jobs may end by themselves first. With `exit` the process ends too, as SIGTERM does; the answer
        comes before that.
        """
        if body.deadline_s is not None and not body.drain:
            raise RequestError("deadline_s bounds a drain; say drain: true", field="deadline_s")
        if body.exit:
            self._service.request_exit(drain_s=(body.deadline_s if body.drain else 0.0))
            return JsonAnswer({"status": "stopping", "instance_id": self._service.instance_id})
        await self._service.pipeline.stop(drain=body.drain, deadline_s=body.deadline_s)
        return self._state()

    async def resize(self, body: PoolSizes) -> Response:
        """Set the number of jobs that may be in a stage at once; shrinking interrupts nobody. Gives the new pools."""
        if not body.model_fields_set:
            raise RequestError("name a pool: init, run or eval", field="run")
        self._service.pipeline.resize(init=body.init, run=body.run, eval=body.eval)
        return JsonAnswer(self._service.pipeline.snapshot().pools)

    async def status(self) -> Response:
        """The whole service at one moment; `instance_id` is new at each start of the process."""
        service = self._service
        return JsonAnswer(
            {
                **asdict(service.pipeline.snapshot()),
                "instance_id": service.instance_id,
                "llm_servers": [server.model_dump() for server in service.llm_servers()],
                "llm_calls_in_flight": service.backends.calls_in_flight,
                "leftovers": service.leftovers(),
            }
        )

    async def environments(self) -> Response:
        """The tasks that are served, and the environments behind those that have one."""
        handlers = self._service.handlers
        described = [
            {
                "task": environment.name,
                "alias": environment.name.removesuffix("_agent"),
                "agent": environment.agent_type,
                "resources_server": environment.resources_type,
                "tools": environment.agent.tools,
                "max_turns": environment.agent.max_turns,
                "description": environment.agent.description,
            }
            for environment in handlers.environments()
        ]
        return JsonAnswer({"tasks": handlers.names(), "environments": described})

    async def health(self) -> Response:
        """Answers as long as the process can answer at all."""
        return self._state()

    async def ready(self) -> Response:
        """200 once the pools run, with or without an inference endpoint."""
        if self._service.pipeline.state != "running":
            raise NotRunning(f"the pools are {self._service.pipeline.state}; POST /start starts them")
        return self._state()

    async def metrics(self) -> Response:
        """Jobs, queues, pools and endpoints in Prometheus' text format."""
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    def _state(self) -> JsonAnswer:
        return JsonAnswer({"status": self._service.pipeline.state, "instance_id": self._service.instance_id})
