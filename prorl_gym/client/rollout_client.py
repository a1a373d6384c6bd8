"""A rollout service as a trainer sees it."""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Literal, Self
from urllib.parse import quote

from pydantic import TypeAdapter, ValidationError

from prorl_gym.client.connection import Connection
from prorl_gym.client.event_stream import follow
from prorl_gym.client.replies import Accepted, CancelReport, Environments, JobEvent, Removed, ServiceState
from prorl_gym.errors import ProrlGymError, RequestError
from prorl_gym.types import (
    JobRequest,
    JobResult,
    JobView,
    LlmServer,
    ResultPart,
    SamplingParams,
    ServerStatus,
    StageTimeouts,
)

POLL_S = 50.0
"""One long poll; below the 60 s after which common proxies drop an idle connection."""

_ANSWER_S = 60.0
_CANCEL_S = 5.0

_ACCEPTED = TypeAdapter(Accepted)
_VIEW = TypeAdapter(JobView)
_CANCEL_REPORT = TypeAdapter(CancelReport)
_STATE = TypeAdapter(ServiceState)
_STATUS = TypeAdapter(ServerStatus)
_ENVIRONMENTS = TypeAdapter(Environments)
_LLM_SERVER = TypeAdapter(LlmServer)
_LLM_SERVERS = TypeAdapter(list[LlmServer])
_REMOVED = TypeAdapter(Removed)
_POOLS = TypeAdapter(dict[str, Any])


class RolloutClient:
    """One service. Any number of calls at once, from one event loop; `async with`, or `close` at the end.

    Every method raises a `RequestError` subclass when the service refuses, `ServiceUnreachable` when it does not answer
    (also not after `retry_for_s` of retries), and `ServiceError` when the answer is none of its own.

    Args:
        address: `http://HOST:PORT`.
        token: Bearer token, where the service wants one.
        retry_for_s: How long a call is repeated that got no answer, or found the queue full.
        compress: Accept results as gzip: cheaper over a network, dearer on one machine.

    Attributes:
        run_id: Prefix of the job ids that this client makes up: new for each client, so that a restarted trainer never
            gets an old policy's result. `cancel(prefix=client.run_id)` ends all that it started.
    """

    def __init__(
        self, address: str, *, token: str | None = None, retry_for_s: float = 30.0, compress: bool = True
    ) -> None:
        self.run_id = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._connection = Connection(address.rstrip("/"), token=token, retry_for_s=retry_for_s, compress=compress)

    @property
    def address(self) -> str:
        """Where the service is."""
        return self._connection.address

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop every connection; jobs go on. Idempotent."""
        await self._connection.close()

    # -- jobs -----------------------------------------------------------------------------------------------------

    async def process(
        self,
        instance: Mapping[str, Any],
        *,
        task: str | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        job_id: str | None = None,
        timeout_s: float | None = None,
        stage_timeouts_s: StageTimeouts | Mapping[str, float] | None = None,
        priority: int = 0,
        group_id: str | None = None,
        policy: str = "default",
        include: Sequence[ResultPart] = ("messages", "segments"),
        return_ledger: bool = False,
        cancel_job: bool = True,
    ) -> JobResult:
        """Roll out one row and wait for the result, however the job ended.

        No connection is held for the whole job. Cancelling this call cancels the job too, unless `cancel_job` is False.

        Args:
            instance: The data row; numpy values are fine.
            task: None lets the row say it.
            sampling_params: What is left out is the service's default.
            job_id: None makes one up, see `run_id`.
            timeout_s: The job's budget; None is the service's default.
            stage_timeouts_s: Budgets per stage.
            priority: Higher first.
            group_id: Common name of the rollouts of one prompt.
            policy: Whose backends sample.
            include: Parts of the result to send; `token_ids` (per message) grow with the square of the turns.
            return_ledger: Send the record of each model call too.
            cancel_job: Whether a cancel of this call is one of the job.

        Raises:
            JobNotFound: The service lost the job: it was restarted, or the result expired.
        """
        name = job_id or self.new_job_id()
        fields = {
            "task": task,
            "sampling_params": sampling_params,
            "timeout_s": timeout_s,
            "stage_timeouts_s": stage_timeouts_s,
            "group_id": group_id,
        }
        request = _request(
            instance=instance,
            job_id=name,
            priority=priority,
            policy=policy,
            return_ledger=return_ledger,
            **{key: value for key, value in fields.items() if value is not None},
        )
        parts = (*include, "ledger") if return_ledger and "ledger" not in include else tuple(include)
        try:
            await self.submit(request)
            return await self.wait(name, include=parts)
        except asyncio.CancelledError:
            if cancel_job:
                await self._cancel_quietly(name)
            raise

    def new_job_id(self) -> str:
        """An id that no other client uses."""
        return f"{self.run_id}-{next(self._numbers)}"

    async def submit(self, request: JobRequest) -> str:
        """Hand a job in and return its id, without waiting; the same id with an equal body is the same job."""
        if request.job_id is None:
            request = request.model_copy(update={"job_id": self.new_job_id()})
        body = {
            "instance": request.instance,
            **request.model_dump(mode="json", exclude={"instance"}, exclude_unset=True),
            "job_id": request.job_id,
        }
        return (await self._connection.call("POST", "/jobs", _ACCEPTED, body=body)).job_id

    async def wait(
        self, job_id: str, *, include: Sequence[ResultPart] = ("messages", "segments"), timeout_s: float | None = None
    ) -> JobResult:
        """Wait for a job's result by long polls. Cancelling ends only the wait.

        Args:
            job_id: The job.
            include: Parts of the result to send.
            timeout_s: None waits to the job's own end.

        Raises:
            JobNotFound: No such job (any more).
            TimeoutError: It has not ended after `timeout_s`.
        """
        async with asyncio.timeout(timeout_s) as deadline:
            while True:
                left_s = POLL_S
                if (when := deadline.when()) is not None:
                    left_s = min(POLL_S, max(0.0, when - asyncio.get_running_loop().time()))
                view = await self.get(job_id, include=include, wait_s=left_s)
                if view.result is not None:
                    return view.result

    async def get(self, job_id: str, *, include: Sequence[ResultPart] = ("messages",), wait_s: float = 0.0) -> JobView:
        """Where a job is: its status, the messages so far, and the result once there is one.

        Args:
            job_id: The job.
            include: Parts of the result to send.
            wait_s: Answer when the job has ended, at the latest after so long.
        """
        return await self._connection.call(
            "GET",
            f"/jobs/{quote(job_id, safe='')}",
            _VIEW,
            query={"wait_s": f"{wait_s:g}", "include": ",".join(include)},
            timeout_s=wait_s + _ANSWER_S,
        )

    async def cancel(
        self,
        job_id: str | None = None,
        *,
        job_ids: Iterable[str] = (),
        prefix: str | None = None,
        group_id: str | None = None,
    ) -> CancelReport:
        """Cancel the union of what is named; whoever waits gets the partial trajectory at once. Harmless twice."""
        named = {"job_id": job_id, "job_ids": list(job_ids) or None, "prefix": prefix, "group_id": group_id}
        body = {key: value for key, value in named.items() if value is not None}
        return await self._connection.call("POST", "/cancel", _CANCEL_REPORT, body=body)

    def events(self, job_id: str, *, after: int = 0) -> AsyncIterator[JobEvent]:
        """Follow a job from its first event (or the one after `after`) to its final status; reconnects by itself."""
        return follow(self._connection, f"/jobs/{quote(job_id, safe='')}/events", after)

    async def _cancel_quietly(self, job_id: str) -> None:
        """Best effort, bounded: the caller is being cancelled itself."""
        with contextlib.suppress(ProrlGymError, TimeoutError):
            async with asyncio.timeout(_CANCEL_S):
                await self.cancel(job_id)

    # -- the service ----------------------------------------------------------------------------------------------

    async def status(self) -> ServerStatus:
        """Counts and occupancies of the whole service."""
        return await self._connection.call("GET", "/status", _STATUS)

    async def health(self) -> ServiceState:
        """Answers as long as the process can answer at all; needs no token."""
        return await self._connection.call("GET", "/health", _STATE)

    async def environments(self) -> Environments:
        """What jobs may ask for."""
        return await self._connection.call("GET", "/environments", _ENVIRONMENTS)

    async def start(self) -> ServiceState:
        """Start the pools; harmless when they run."""
        return await self._connection.call("POST", "/start", _STATE, body={})

    async def stop(self, *, drain: bool = False, deadline_s: float | None = None, exit: bool = False) -> ServiceState:
        """End all jobs and sandboxes; the process, its backends and results stay, unless `exit`.

        Args:
            drain: Let the jobs end by themselves first.
            deadline_s: How long a drain may take; None waits for all.
            exit: End the process too; the answer comes before.
        """
        body: dict[str, Any] = {"drain": drain, "exit": exit}
        if deadline_s is not None:
            body["deadline_s"] = deadline_s
        return await self._connection.call(
            "POST", "/stop", _STATE, body=body, timeout_s=None, retry_for_s=0.0 if exit else None
        )

    async def resize_pools(
        self, *, init: int | None = None, run: int | None = None, eval: int | None = None
    ) -> dict[str, Any]:
        """Set how many jobs may be in a stage at once; returns the pools. Shrinking interrupts nobody."""
        sizes = {"init": init, "run": run, "eval": eval}
        body = {name: size for name, size in sizes.items() if size is not None}
        return await self._connection.call("PATCH", "/pools", _POOLS, body=body)

    # -- backends -------------------------------------------------------------------------------------------------

    async def add_llm_server(
        self,
        address: str,
        *,
        policy_version: int | None = None,
        policy: str = "default",
        dialect: str | None = None,
        model: str | None = None,
        api_key_env: str | None = None,
    ) -> LlmServer:
        """Register an inference endpoint, or renew its registration, a new policy version say.

        The answer says whether the service can reach it; one that it cannot is kept and tried again.

        Args:
            address: With or without `/v1`.
            policy_version: Stamped on what it samples from now on; None stamps nothing.
            policy: Whose backend it is.
            dialect: None finds out.
            model: The name it serves, where it serves several.
            api_key_env: Name of the variable, in the service's environment, that holds the engine's key; the service's
                configuration must list it in `backend.api_key_envs`.
        """
        optional = {"policy_version": policy_version, "dialect": dialect, "model": model, "api_key_env": api_key_env}
        body = {"address": address, "policy": policy, **{k: v for k, v in optional.items() if v is not None}}
        return await self._connection.call("POST", "/add_llm_server", _LLM_SERVER, body=body)

    async def clear_llm_server(
        self, *, policy: str = "default", in_flight: Literal["continue", "park", "abort"] = "continue"
    ) -> list[LlmServer]:
        """Unregister a policy's endpoints and return them; `park` answers once the calls in flight have drained."""
        body = {"policy": policy, "in_flight": in_flight}
        return await self._connection.call("POST", "/clear_llm_server", _LLM_SERVERS, body=body, timeout_s=None)

    async def remove_llm_server(self, address: str, *, policy: str = "default") -> bool:
        """Unregister one endpoint; its tasks move to another one, or wait. False when it was not registered."""
        body = {"address": address, "policy": policy}
        return (await self._connection.call("POST", "/remove_llm_server", _REMOVED, body=body)).removed

    async def llm_servers(self) -> list[LlmServer]:
        """The registered endpoints of every policy."""
        return await self._connection.call("GET", "/llm_servers", _LLM_SERVERS)


def _request(**fields: Any) -> JobRequest:
    """A JobRequest, refused here as the service would refuse it.

    Raises:
        RequestError: Names the field.
    """
    try:
        return JobRequest(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{field}: {first['msg']}", field=field) from error
