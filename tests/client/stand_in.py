"""A small real HTTP server that speaks the service's API, for faults that the real one does not have."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any, Self

from aiohttp import web


class StandIn:
    """Attributes are what a test looks at or sets.

    Attributes:
        jobs: Accepted bodies by job id.
        finished: Jobs end at once when set, else on `finish`.
        answers: Scripted answers by `METHOD path`, used up first: a status with a body, or None to cut the connection.
        calls: How often each `METHOD path` was called.
        waiting: Long polls open now.
    """

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self.jobs: dict[str, dict[str, Any]] = {}
        self.cancelled: list[str] = []
        self.finished = asyncio.Event()
        self.answers: dict[str, list[tuple[int, Any, dict[str, str]] | None]] = {}
        self.calls: Counter[str] = Counter()
        self.queries: list[dict[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[tuple[str, Any]] = []
        self.waiting = 0
        self.most_waiting = 0
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._scripted])  # type: ignore[list-item]
        app.router.add_post("/jobs", self._submit)
        app.router.add_get("/jobs/{id}", self._look)
        app.router.add_get("/jobs/{id}/events", self._events)
        app.router.add_post("/cancel", self._cancel)
        app.router.add_route("*", "/{rest:.*}", self._echo)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=4096)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @web.middleware
    async def _scripted(self, request: web.Request, handler: Any) -> web.StreamResponse:
        name = f"{request.method} {request.path}"
        self.calls[name] += 1
        self.headers.append(dict(request.headers))
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return error(401, "Unauthorized", "the token is missing or wrong")
        if request.method in {"POST", "PATCH"}:
            assert request.headers["Content-Type"] == "application/json"
            self.bodies.append((name, json.loads(await request.read())))
        if self.answers.get(name):
            answer = self.answers[name].pop(0)
            if answer is None:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            status, body, headers = answer
            text = body if isinstance(body, str) else json.dumps(body)
            return web.Response(status=status, text=text, headers=headers)
        response: web.StreamResponse = await handler(request)
        return response

    async def _submit(self, request: web.Request) -> web.Response:
        body = self.bodies[-1][1]
        self.jobs.setdefault(body["job_id"], body)
        return web.json_response({"job_id": body["job_id"], "status": "queued"}, status=202)

    async def _look(self, request: web.Request) -> web.Response:
        job_id = request.match_info["id"]
        self.queries.append(dict(request.query))
        if job_id not in self.jobs:
            return error(404, "JobNotFound", f"no job {job_id!r}")
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            async with asyncio.timeout(float(request.query["wait_s"])):
                await self.finished.wait()
        except TimeoutError:
            return web.json_response({"job_id": job_id, "status": "run", "messages": []})
        finally:
            self.waiting -= 1
        result = {
            "job_id": job_id,
            "task": "math",
            "status": "cancelled" if job_id in self.cancelled else "completed",
            "reward": 1.0,
            "messages": [{"role": "assistant", "content": "4" * 5000}],
            "something_new": 1,
        }
        response = web.json_response({"job_id": job_id, "status": result["status"], "result": result})
        response.enable_compression()
        return response

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        after = int(request.headers["Last-Event-ID"])
        story = ["queued", "init", "run", "tool\u2028call", "completed"]
        for seq, name in enumerate(story, start=1):
            if seq <= after:
                continue
            data = json.dumps({"seq": seq, "event": name, "at": 1.5, "turn": seq}, ensure_ascii=False)
            await response.write(b": still here\n\n" + f"id: {seq}\nevent: x\ndata: {data}\n\n".encode())
            if seq == 2 and after == 0:
                assert request.transport is not None
                request.transport.abort()
                break
        return response

    async def _cancel(self, request: web.Request) -> web.Response:
        body = self.bodies[-1][1]
        ids = [*body.get("job_ids", []), *([body["job_id"]] if "job_id" in body else [])]
        if "prefix" in body:
            ids += [job for job in self.jobs if job.startswith(body["prefix"])]
        self.cancelled += ids
        return web.json_response({"cancelled": ids, "already_ended": [], "not_found": []})

    async def _echo(self, request: web.Request) -> web.Response:
        return error(404, "NoSuchPath", "nothing is served there")


def error(status: int, kind: str, message: str, **more: Any) -> web.Response:
    return web.json_response({"error": {"type": kind, "message": message, **more}}, status=status)


def refusal(status: int, kind: str, message: str = "no", **headers: str) -> tuple[int, Any, dict[str, str]]:
    return status, {"error": {"type": kind, "message": message, "field": "f"}}, headers
