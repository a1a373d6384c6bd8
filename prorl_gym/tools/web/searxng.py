"""Searches through a SearXNG instance's JSON API.

Source: SearXNG documentation, "Search API", and its `webapp.search` (403 for a format that is not in settings.yml,
400 "No query" for an empty one).
"""

from typing import Any

from prorl_gym.errors import ConfigError
from prorl_gym.tools.web.failure import FailureKind, WebFailure
from prorl_gym.tools.web.json_service import JsonService, text_of
from prorl_gym.tools.web.provider import Hit, SearchProvider

_WORKING = frozenset({200, 400, 429})
"""What an instance that can serve us says to an empty query; 429 is its limiter."""


class SearxngSearch(SearchProvider):
    """One instance, which may be on a private network: its address is the operator's."""

    def __init__(self, address: str) -> None:
        self._service = JsonService("The search service", address)

    async def start(self) -> None:
        """Ask for nothing, which tells whether the instance is there and speaks JSON, and costs no engine a search."""
        await self._service.start()
        where = f"tool.web.address={self._service.address}"
        try:
            status, _, _ = await self._service.exchange("GET", "/search", params={"q": "", "format": "json"})
        except WebFailure as error:
            await self._service.stop()
            raise ConfigError(f"{where}: SearXNG cannot be reached there ({error.__cause__ or error})") from error
        if status in _WORKING:
            return
        await self._service.stop()
        if status == 403:
            raise ConfigError(f"{where}: SearXNG refuses JSON; add `json` to `search.formats` in its settings.yml")
        raise ConfigError(f"{where}: answered /search with status {status}; is it SearXNG's own address?")

    async def stop(self) -> None:
        """Close the connections."""
        await self._service.stop()

    async def search(self, query: str, count: int) -> list[Hit]:
        """See `SearchProvider.search`. Nothing from engines that did not answer is a failure."""
        reply = await self._service.ask("GET", "/search", params={"q": query, "format": "json"})
        results = reply.get("results")
        if not isinstance(results, list):
            raise WebFailure("The search service answered without results.", "provider")
        hits = [
            Hit(text_of(found, "title"), text_of(found, "url"), text_of(found, "content"))
            for found in results
            if isinstance(found, dict) and text_of(found, "url")
        ]
        if not hits and (silent := _silent_engines(reply.get("unresponsive_engines"))):
            reasons = ", ".join(silent)
            kind: FailureKind = (
                "captcha" if "captcha" in reasons.lower() else "rate_limit" if "many" in reasons else "provider"
            )
            raise WebFailure(f"The search failed: engines did not answer ({reasons}).", kind, retry_after_s=0.0)
        return hits[:count]


def _silent_engines(listed: Any) -> list[str]:
    """Each engine that gave nothing, with its reason."""
    if not isinstance(listed, list):
        return []
    pairs = (entry if isinstance(entry, list) else [entry] for entry in listed[:20])
    return [": ".join(str(part)[:100] for part in pair[:2]) for pair in pairs]
