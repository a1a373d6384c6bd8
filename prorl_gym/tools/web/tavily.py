"""Searches through Tavily. Source: Tavily API reference, `POST /search`."""

import os

from prorl_gym.errors import ConfigError
from prorl_gym.logs import hide
from prorl_gym.tools.web.failure import WebFailure
from prorl_gym.tools.web.json_service import JsonService, text_of
from prorl_gym.tools.web.provider import Hit, SearchProvider

PUBLIC_ADDRESS = "https://api.tavily.com"
MAX_RESULTS = 20


class TavilySearch(SearchProvider):
    """One account.

    Args:
        key_env: Name of the environment variable that holds its key.

    Raises:
        ConfigError: That variable is not set.
    """

    def __init__(self, address: str | None, key_env: str) -> None:
        key = os.environ.get(key_env, "").strip()
        if not key:
            raise ConfigError(f"tool.web.api_key_env={key_env}: that environment variable is not set")
        hide(key)
        self._service = JsonService("Tavily", address or PUBLIC_ADDRESS, {"Authorization": f"Bearer {key}"})

    async def start(self) -> None:
        """Open the session."""
        await self._service.start()

    async def stop(self) -> None:
        """Close it."""
        await self._service.stop()

    async def search(self, query: str, count: int) -> list[Hit]:
        """See `SearchProvider.search`."""
        reply = await self._service.ask(
            "POST", "/search", json={"query": query, "max_results": min(count, MAX_RESULTS)}
        )
        results = reply.get("results")
        if not isinstance(results, list):
            raise WebFailure("Tavily answered without results.", "provider")
        return [
            Hit(text_of(found, "title"), text_of(found, "url"), text_of(found, "content"))
            for found in results
            if isinstance(found, dict) and text_of(found, "url")
        ][:count]
