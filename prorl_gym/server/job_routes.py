"""Jobs over HTTP: submit, wait, look, follow, cancel."""

import asyncio
import contextlib
import gzip
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any

from fastapi import Query
from orjson import Fragment
from starlette.requests import Request
from starlette.responses import Response

from prorl_gym.errors import RequestError
from prorl_gym.pipeline import Outcome, Pipeline, Ticket
from prorl_gym.server.answers import JsonAnswer
from prorl_gym.server.bodies import Accepted, CancelAnswer, CancelBody, JobQuery
from prorl_gym.server.event_stream import EventStream, end_tasks, until_gone
from prorl_gym.server.json_body import encode_in_pieces, encode_json
from prorl_gym.server.operation import ClientGone, Description, Operation, header
from prorl_gym.types import JobRequest, JobResult, JobView, ResultPart

COMPRESSED_FROM_BYTES = 4096
"""Below it a gzip body saves nothing worth its time."""


class JobRoutes:
    """Endpoints about jobs. `operations` lists them."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._attached: Counter[str] = Counter()
        self._encoders = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prorl-encode")
        self.operations = (
            Operation("POST", "/process", self.process, Description(
                "Roll out one row and wait", "jobs", JobResult, errors=(400, 401, 409, 413, 415, 429, 503))),
            Operation("POST", "/jobs", self.submit, Description(
                "Submit a job", "jobs", Accepted, 202, errors=(400, 401, 409, 413, 415, 429, 503))),
            Operation("GET", "/jobs/{job_id}", self.look, Description(
                "Where a job is, and its result", "jobs", JobView, errors=(400, 401, 404))),
            Operation("GET", "/jobs/{job_id}/events", self.follow, Description(
                "Follow a job", "jobs", None, errors=(401, 404), media_type="text/event-stream")),
            Operation("POST", "/cancel", self.cancel, Description(
                "Cancel jobs", "jobs", CancelAnswer, errors=(400, 401, 413, 415))),
        )  # fmt: skip

    async def process(self, request: Request, body: JobRequest) -> Response:
        """Answers when the job has ended, however it ended: a job that ran and failed is a 200 whose result says so.

        The same `job_id` with an equal body joins the running job or gives its result. When the client leaves, the job
        goes on and can be fetched by its id, unless it asked for `cancel_on_disconnect`. With `include` the result may
        come compressed.
        """
        ticket = self._pipeline.submit(body)
        self._attached[ticket.id] += 1
        try:
            outcome = ticket.outcome or await _outcome_while_there(request, ticket)
        except ClientGone:
            if body.cancel_on_disconnect and self._attached[ticket.id] == 1:
                self._pipeline.cancel(job_ids=[ticket.id])
            raise
        finally:
            self._attached[ticket.id] -= 1
            if not self._attached[ticket.id]:
                del self._attached[ticket.id]
        return await self._result(request, outcome, body.include, view_of=None, compress=body.include is not None)

    async def submit(self, body: JobRequest) -> Response:
        """Answers at once; poll `GET /jobs/{job_id}` or follow `/jobs/{job_id}/events`."""
        ticket = self._pipeline.submit(body)
        return JsonAnswer({"job_id": ticket.id, "status": ticket.status}, status_code=202)

    async def look(self, request: Request, job_id: str, query: Annotated[JobQuery, Query()]) -> Response:
        """At any time: the status and, until there is a result, the messages so far.

        With `wait_s` the answer comes when the job has ended, at the latest after so long.
        """
        ticket = self._pipeline.get(job_id)
        outcome = ticket.outcome
        if outcome is None and query.wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(query.wait_s):
                    outcome = await _outcome_while_there(request, ticket)
        if outcome is not None:
            named = "include" in query.model_fields_set
            return await self._result(request, outcome, query.include, view_of=ticket.id, compress=named)
        messages = ticket.partial_messages() if "messages" in query.include else []
        return JsonAnswer({"job_id": ticket.id, "status": ticket.status, "messages": messages, "result": None})

    async def follow(self, request: Request, job_id: str) -> Response:
        """Server-sent events: stages, turns, tool calls, and last of all the final status, which ends the stream.

        `Last-Event-ID` continues where a broken stream ended; a gap in `id` means that older events are gone.
        """
        ticket = self._pipeline.get(job_id)
        after = header(request.scope, b"last-event-id") or b"0"
        if not after.isdigit() or len(after) > 18:
            raise RequestError("Last-Event-ID is not a number that this server gave", field="last-event-id")
        return EventStream(ticket.events, int(after))

    async def cancel(self, body: CancelBody) -> Response:
        """Cancels the union of what is named, from any moment after submit; whoever waits is answered at once.

        The partial trajectory stays in the result. A second cancel is harmless.
        """
        if body.job_id is None and not body.job_ids and body.prefix is None and body.group_id is None:
            raise RequestError("name what to cancel: job_id, job_ids, prefix or group_id", field="job_id")
        ids = [*body.job_ids, *([body.job_id] if body.job_id is not None else [])]
        report = self._pipeline.cancel(job_ids=ids, prefix=body.prefix, group_id=body.group_id)
        answer = {
            "cancelled": report.cancelled,
            "already_ended": report.already_ended,
            "not_found": report.not_found,
        }
        return JsonAnswer(answer)

    async def _result(
        self,
        request: Request,
        outcome: Outcome,
        include: Collection[ResultPart] | None,
        *,
        view_of: str | None,
        compress: bool,
    ) -> Response:
        """The result, alone or within the JobView of a job id; made off the event loop unless it is tiny."""
        accepted = header(request.scope, b"accept-encoding") or b""
        compress = compress and b"gzip" in accepted and b"gzip;q=0" not in accepted.replace(b" ", b"")
        tiny = not outcome.trajectory.entries and not outcome.artifacts
        work = partial(_encoded, outcome, include, view_of, encode_json if tiny else encode_in_pieces, compress)
        loop = asyncio.get_running_loop()
        body, is_compressed = work() if tiny else await loop.run_in_executor(self._encoders, work)
        headers = {"content-encoding": "gzip", "vary": "accept-encoding"} if is_compressed else None
        return JsonAnswer(body, headers=headers)


async def _outcome_while_there(request: Request, ticket: Ticket) -> Outcome:
    """Wait for the job's end.

    Raises:
        ClientGone: The client closed its connection first.
    """
    waiting = asyncio.create_task(ticket.wait())
    gone = asyncio.create_task(until_gone(request.receive))
    try:
        await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(waiting, gone)
    outcome = None if waiting.cancelled() else waiting.result()
    if outcome is None:
        raise ClientGone
    return outcome


def _encoded(
    outcome: Outcome,
    include: Collection[ResultPart] | None,
    view_of: str | None,
    encode: Callable[[dict[str, Any]], bytes],
    compress: bool,
) -> tuple[bytes, bool]:
    """The body, and whether it is compressed."""
    body = encode(outcome.result(include))
    if view_of is not None:
        view = {"job_id": view_of, "status": outcome.status, "messages": [], "result": Fragment(body)}
        body = encode_json(view)
    if compress and len(body) >= COMPRESSED_FROM_BYTES:
        return gzip.compress(body, compresslevel=1, mtime=0), True
    return body, False
