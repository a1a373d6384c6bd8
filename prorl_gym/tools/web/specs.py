"""What the model is told of the web tools."""

from prorl_gym.tools.spec import ToolSpec

WEB_SEARCH = ToolSpec(
    "web_search",
    "Search for pages. Returns titles, addresses and excerpts, the best match first; read a whole page with web_fetch "
    "where you have it.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for, in a few words."},
            "max_results": {
                "type": "integer",
                "exclusiveMinimum": 0,
                "description": "How many results to return at most.",
            },
        },
        "required": ["query"],
    },
)

WEB_FETCH = ToolSpec(
    "web_fetch",
    "Read the text of a page. A long page comes in parts: call again with `start` for the next one.",
    {
        "type": "object",
        "properties": {
            "url": {"type": "string", "description": "The page's full address, as web_search gives it."},
            "start": {"type": "integer", "description": "The character to start from; 0 is the beginning."},
        },
        "required": ["url"],
    },
)

WEB_TOOLS: dict[str, ToolSpec] = {spec.name: spec for spec in (WEB_SEARCH, WEB_FETCH)}
"""By name."""
