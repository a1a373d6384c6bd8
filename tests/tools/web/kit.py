"""A web on loopback, and web tools that are let in: only here, by a rule that no configuration can express."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from prorl_gym.config.models import WebConfig
from prorl_gym.handlers.web import EXTRACTION
from prorl_gym.resources.graders import GraderPool
from prorl_gym.tools.spec import ToolReply
from prorl_gym.tools.web.guard import ConnectRule
from prorl_gym.tools.web.provider import Hit, SearchProvider
from prorl_gym.tools.web.tools import PageReader, WebTools

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Site:
    """A server whose answers a test writes.

    Attributes:
        asked: Path and query of each request.
        headers: Those of the last one.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.headers: Mapping[str, str] = {}
        self.address = ""
        self.port = 0

    def url(self, path: str) -> str:
        return self.address + path


@asynccontextmanager
async def site(routes: Mapping[str, Handle | web.Response], host: str = "127.0.0.1") -> AsyncIterator[Site]:
    """Serve a path each; a Response is served again and again."""
    served = Site()

    async def answer(request: web.Request) -> web.StreamResponse:
        served.asked.append(request.path_qs)
        served.headers = dict(request.headers)
        route = routes.get(request.path)
        if route is None:
            return web.Response(status=404)
        if isinstance(route, web.Response):
            return web.Response(status=route.status, headers=route.headers, body=route.body)
        return await route(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0).start()
        served.port = int(runner.addresses[0][1])
        served.address = f"http://{host}:{served.port}"
        yield served
    finally:
        await runner.cleanup()


class Nothing(SearchProvider):
    """Finds nothing."""

    async def search(self, query: str, count: int) -> list[Hit]:
        return []


class OnDemand:
    """The real page reader, without isolation, started by the first page only."""

    def __init__(self) -> None:
        self._pool = GraderPool(EXTRACTION, None, workers=1, timeout_s=10)

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        await self._pool.stop()

    async def grade(self, request: Mapping[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        return await self._pool.grade(request, timeout_s=timeout_s)


class Names(AbstractResolver):
    """Resolves the names of a test; one that has several addresses gives the next one each time."""

    def __init__(self, **addresses: list[str]) -> None:
        self._addresses = {name.replace("_", "."): found for name, found in addresses.items()}
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        found = self._addresses.get(host)
        if not found:
            raise OSError("no such host")
        address = found.pop(0) if len(found) > 1 else found[0]
        return [ResolveResult(hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=0)]

    async def close(self) -> None:
        pass


def only(*ports: int) -> ConnectRule:
    """Lets pages come from these ports of loopback."""
    return lambda host, port: None if host == "127.0.0.1" and port in ports else "it is not on the public web"


@asynccontextmanager
async def web_tools(
    *,
    rule: ConnectRule | None = None,
    provider: SearchProvider | None = None,
    resolver: AbstractResolver | None = None,
    reader: PageReader | None = None,
    **config: Any,
) -> AsyncIterator[WebTools]:
    """Started web tools."""
    settings = WebConfig.model_validate(config)
    tools = WebTools(settings, provider or Nothing(), reader or OnDemand(), rule=rule, resolver=resolver)
    await tools.start()
    try:
        yield tools
    finally:
        await tools.stop()


async def fetch(tools: WebTools, url: str, **arguments: Any) -> ToolReply:
    return await tools.call("web_fetch", {"url": url, **arguments})


def kind(reply: ToolReply) -> str | None:
    """Why it failed; None when it did not."""
    assert reply.error == ("failure" in reply.details)
    return reply.details.get("failure")


def html(body: str, title: str = "A title") -> web.Response:
    page = f"<html><head><title>{title}</title></head><body>{body}</body></html>"
    return web.Response(body=page.encode(), headers={"Content-Type": "text/html; charset=utf-8"})
