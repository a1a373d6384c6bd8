"""The web tools of a service: one search provider and one page fetcher for all of its jobs.

The invariant: whatever the web does is an observation for the model. A search that did not work says so; it is never
given as one that found nothing.
"""

import asyncio
import base64
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar

from aiohttp.abc import AbstractResolver

from prorl_gym.config.models import WebConfig
from prorl_gym.errors import EvaluationError
from prorl_gym.tools.spec import ToolReply
from prorl_gym.tools.web.captcha import asks_for_human
from prorl_gym.tools.web.failure import WebFailure
from prorl_gym.tools.web.fetch import Page, PageFetcher
from prorl_gym.tools.web.guard import ConnectRule, PublicOnly
from prorl_gym.tools.web.provider import Hit, SearchProvider
from prorl_gym.tools.web.specs import WEB_SEARCH

log = logging.getLogger(__name__)

BACKOFF_S = 0.5
MAX_QUERY_CHARACTERS = 1000
_LINE_CHARACTERS = 500
_HTML = frozenset({"text/html", "application/xhtml+xml", ""})
_TEXT_ENDINGS = ("json", "xml", "yaml", "javascript")
T = TypeVar("T")


class PageReader(Protocol):
    """Makes text of pages, out of this process; `resources.graders.GraderPool` around `extraction.py` is one."""

    async def start(self) -> None:
        """Raises ConfigError when it cannot work."""

    async def stop(self) -> None:
        """End it; idempotent."""

    async def grade(self, request: Mapping[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Read one; raises EvaluationError when it cannot be read."""
        ...


class WebTools:
    """`web_search` and `web_fetch`.

    Args:
        reader: None where pages never come from the web.
        rule: Where pages may come from; None is the public web only.
        resolver: Of the names of pages; None is the host's own.
    """

    def __init__(
        self,
        config: WebConfig,
        provider: SearchProvider,
        reader: PageReader | None,
        *,
        rule: ConnectRule | None = None,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._config = config
        self._provider = provider
        self._reader = reader
        self._fetcher = PageFetcher(
            rule or PublicOnly(config.blocked_networks),
            max_bytes=config.max_page_bytes,
            max_redirects=config.max_redirects,
            limit=config.concurrent,
            resolver=resolver,
        )
        self._slots = asyncio.Semaphore(config.concurrent)
        self._running: AsyncExitStack | None = None

    async def start(self) -> None:
        """Bring everything up; a second call is harmless.

        Raises:
            ConfigError: The provider or the reader cannot work.
        """
        if self._running is not None:
            return
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._provider.stop)
            await self._provider.start()
            if self._reader is not None:
                stack.push_async_callback(self._reader.stop)
                await self._reader.start()
            await stack.enter_async_context(self._fetcher)
            self._running = stack.pop_all()

    async def stop(self) -> None:
        """Take everything down; idempotent. Calls in flight end as failures."""
        if self._running is not None:
            running, self._running = self._running, None
            await running.aclose()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolReply:
        """Answer one call whose arguments were checked against the tool's schema. Nothing but a cancel raises."""
        began = time.monotonic()
        searching = name == WEB_SEARCH.name
        limit_s = self._config.search_timeout_s if searching else self._config.fetch_timeout_s
        failure: WebFailure
        try:
            async with self._slots, asyncio.timeout(limit_s):
                text = await (self._search(arguments) if searching else self._fetch(arguments))
            return ToolReply(text, duration_s=time.monotonic() - began)
        except TimeoutError:
            failure = WebFailure(f"There was no answer within {limit_s:g} s.", "timeout")
        except WebFailure as error:
            failure = error
        if searching:
            log.warning("web_search failed (%s): %s", failure.kind, failure)
        return ToolReply(
            f"{name} failed: {failure}",
            error=True,
            timed_out=failure.kind == "timeout",
            duration_s=time.monotonic() - began,
            details={"failure": failure.kind},
        )

    async def _search(self, arguments: Mapping[str, Any]) -> str:
        query = " ".join(str(arguments["query"]).split())
        if not query:
            raise WebFailure("The query is empty.", "bad_request")
        if len(query) > MAX_QUERY_CHARACTERS:
            raise WebFailure(f"The query is longer than {MAX_QUERY_CHARACTERS} characters.", "bad_request")
        count = min(int(arguments.get("max_results") or self._config.max_results), self._config.max_results)
        hits = await self._persisting(lambda: self._provider.search(query, count), self._config.search_timeout_s)
        return "\n".join(_described(number, hit) for number, hit in enumerate(hits, 1)) or "No results."

    async def _fetch(self, arguments: Mapping[str, Any]) -> str:
        url = str(arguments["url"])
        own = self._provider.read(url)
        start = max(0, int(arguments.get("start") or 0))
        if own is not None:
            return self._part(own, start, cut=False)
        page = await self._persisting(lambda: self._fetcher.fetch(url), self._config.fetch_timeout_s)
        return self._part(await self._read(page), start, cut=page.cut)

    async def _read(self, page: Page) -> str:
        html = page.content_type in _HTML
        if not html and not page.content_type.startswith("text/") and not page.content_type.endswith(_TEXT_ENDINGS):
            raise WebFailure(f"{page.url} is {page.content_type[:100]}, which has no text to read.", "unreadable")
        assert self._reader is not None, "only pages of the web get here"  # noqa: S101
        body = base64.b64encode(page.body).decode()
        request = {"body": body, "charset": page.charset, "html": html, "url": page.url}
        try:
            reply = await self._reader.grade(request)
        except EvaluationError as error:
            log.info("page not read: %s: %s", page.url, error)
            raise WebFailure(
                f"{page.url} could not be read: its content is too complex or broken.", "unreadable"
            ) from error
        title, text = str(reply.get("title", "")), str(reply.get("text", ""))
        if html and asks_for_human(200, page.headers, page.body, text=text):
            raise WebFailure(f"{page.url} asks for proof of a human (captcha); the page was not read.", "captcha")
        if not text:
            raise WebFailure(f"{page.url} has no text to read; it may need JavaScript.", "unreadable")
        return f"{title}\n\n{text}" if title and not text.startswith(f"# {title}") else text

    def _part(self, text: str, start: int, *, cut: bool) -> str:
        """What one call shows of a text."""
        if start and start >= len(text):
            raise WebFailure(f"The text has only {len(text)} characters; `start` must be less.", "bad_request")
        end = start + self._config.page_characters
        part = text[start:end]
        if end < len(text):
            return f"{part}\n[characters {start} to {end} of {len(text)}; call again with start={end} for more]"
        return f"{part}\n[the page is longer than what is fetched of one]" if cut else part

    async def _persisting(self, attempt: Callable[[], Awaitable[T]], limit_s: float) -> T:
        """The result of the first attempt that works, within the configured number and the time of one call."""
        deadline = time.monotonic() + limit_s
        for number in range(1, self._config.attempts):
            try:
                return await attempt()
            except WebFailure as failure:
                if failure.retry_after_s is None:
                    raise
                wait_s = max(failure.retry_after_s, BACKOFF_S * 2 ** (number - 1))
                if time.monotonic() + wait_s >= deadline:
                    raise
            await asyncio.sleep(wait_s)
        return await attempt()


def _described(number: int, hit: Hit) -> str:
    url = "".join(hit.url.split())
    lines = (f"{number}. {_line(hit.title) or url}", f"   {url}", f"   {_line(hit.excerpt)}")
    return "\n".join(line for line in lines if line.strip())


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LINE_CHARACTERS else line[:_LINE_CHARACTERS] + " ..."
