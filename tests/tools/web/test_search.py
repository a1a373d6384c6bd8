"""Searching: three providers, and the difference between finding nothing and not having searched."""

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from prorl_gym.errors import ConfigError
from prorl_gym.tools.spec import ToolReply
from prorl_gym.tools.web.local import LocalSearch
from prorl_gym.tools.web.provider import SearchProvider
from prorl_gym.tools.web.searxng import SearxngSearch
from prorl_gym.tools.web.tavily import TavilySearch

from .kit import fetch, kind, site, web_tools

RESULTS = [
    {"title": "Otters", "url": "https://otters.example/", "content": "They hold\n  hands."},
    {"title": None, "url": "https://untitled.example/", "content": 7},
    {"title": "No address"},
    "nonsense",
    {"title": "Third", "url": "https://third.example/", "content": "x" * 2000},
]
SHOWN = """1. Otters
   https://otters.example/
   They hold hands.
2. https://untitled.example/
   https://untitled.example/"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.tools.web.tools.BACKOFF_S", 0.01)
    monkeypatch.setenv("OUR_KEY", "tvly-secret")


def provider_at(name: str, address: str) -> SearchProvider:
    return SearxngSearch(address) if name == "searxng" else TavilySearch(address, "OUR_KEY")


async def search_with(name: str, reply: Any, **arguments: Any) -> tuple[ToolReply, list[str]]:
    """What the tool says when the service gives this reply, and what the service was asked after the start."""

    async def answer(request: web.Request) -> web.Response:
        if request.query.get("q") == "":
            return web.Response(status=400, text="No query")
        if isinstance(reply, web.Response):
            return web.Response(status=reply.status, headers=reply.headers, body=reply.body)
        return web.json_response(reply)

    async with site({"/search": answer}) as service:
        async with web_tools(provider=provider_at(name, service.address)) as tools:
            start = len(service.asked)
            said = await tools.call("web_search", {"query": " otters \n & hands ", **arguments})
        return said, service.asked[start:]


@pytest.mark.parametrize("name", ["searxng", "tavily"])
async def test_results_are_shown_as_far_as_they_make_sense(name: str) -> None:
    reply, asked = await search_with(name, {"results": RESULTS}, max_results=2)
    assert (kind(reply), reply.text) == (None, SHOWN)
    assert asked == ["/search?q=otters+%26+hands&format=json" if name == "searxng" else "/search"]
    reply, _ = await search_with(name, {"results": RESULTS})
    assert reply.text.endswith("x ...")
    assert len(reply.text) < 800


@pytest.mark.parametrize("name", ["searxng", "tavily"])
async def test_a_search_that_worked_may_find_nothing(name: str) -> None:
    reply, _ = await search_with(name, {"results": []})
    assert (kind(reply), reply.text) == (None, "No results.")


@pytest.mark.parametrize("name", ["searxng", "tavily"])
@pytest.mark.parametrize(
    ("reply", "failure", "times"),
    [
        (web.Response(status=429), "rate_limit", 3),
        (web.Response(status=429, headers={"Retry-After": "600"}), "rate_limit", 1),
        (web.Response(status=500), "provider", 3),
        (web.Response(status=401), "provider", 1),
        (web.Response(status=302, headers={"Location": "http://elsewhere.example/"}), "provider", 1),
        (web.Response(status=403, body=b"<div class=g-recaptcha>"), "captcha", 1),
        (web.Response(body=b"<html>Verify you are human</html>"), "captcha", 1),
        (web.Response(body=b"<html>Log in</html>"), "provider", 1),
        (web.Response(body=b"[]"), "provider", 1),
        ({"answer": 42}, "provider", 1),
    ],
)
async def test_a_search_that_did_not_work_never_says_that_there_is_nothing(
    name: str, reply: Any, failure: str, times: int
) -> None:
    said, asked = await search_with(name, reply)
    assert (kind(said), len(asked)) == (failure, times)
    assert said.text.startswith("web_search failed: ")
    assert "No results" not in said.text
    assert "secret" not in said.text


@pytest.mark.parametrize(
    ("engines", "failure"),
    [
        ([["google", "CAPTCHA"], ["bing", "timeout"]], "captcha"),
        ([["duckduckgo", "too many requests"]], "rate_limit"),
        ([["brave", "HTTP error"]], "provider"),
    ],
)
async def test_engines_behind_searxng_that_are_silent_are_no_empty_result(engines: Any, failure: str) -> None:
    said, _ = await search_with("searxng", {"results": [], "unresponsive_engines": engines})
    assert (kind(said), engines[0][0] in said.text) == (failure, True)
    some, _ = await search_with("searxng", {"results": RESULTS, "unresponsive_engines": engines})
    assert kind(some) is None


async def test_tavily_gets_the_key_in_its_header_and_searxng_none() -> None:
    async with site({"/search": web.json_response({"results": []})}) as service:
        for name in ("tavily", "searxng"):
            async with web_tools(provider=provider_at(name, service.address)) as tools:
                await tools.call("web_search", {"query": "q"})
            assert service.headers.get("Authorization") == ("Bearer tvly-secret" if name == "tavily" else None)


@pytest.mark.parametrize(
    ("answer", "words"),
    [(web.Response(status=403), "search.formats"), (web.Response(status=404), "SearXNG's own address")],
)
async def test_a_searxng_that_cannot_serve_us_is_refused_at_start(answer: web.Response, words: str) -> None:
    async with site({"/search": answer}) as service:
        with pytest.raises(ConfigError, match=rf"tool\.web\.address={service.address}.*{words}"):
            await SearxngSearch(service.address).start()
    with pytest.raises(ConfigError, match="cannot be reached"):
        await SearxngSearch(service.address).start()


def test_a_key_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tool\.web\.api_key_env=NO_SUCH_KEY"):
        TavilySearch(None, "NO_SUCH_KEY")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    (folder / "animals").mkdir(parents=True)
    (folder / "animals" / "otter.md").write_text(
        "# The otter\n\nOtters hold hands while they sleep.\n" + "River. " * 90
    )
    (folder / "stones.txt").write_text("Granite is a stone.")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    rows = [
        {"id": "7", "title": "Moss", "contents": "Moss grows on granite."},
        {"url": "https://fern.example/", "text": "Ferns like shade."},
        {"text": "half a \ud800 character"},
    ]
    (folder / "plants.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return folder


async def test_a_folder_is_searched_and_read_without_any_network(library: Path) -> None:
    async with web_tools(provider=LocalSearch(library), page_characters=200) as tools:
        granite = await tools.call("web_search", {"query": "granite stone"})
        otters = await tools.call("web_search", {"query": "Where do otters sleep?", "max_results": 1})
        nothing = [await tools.call("web_search", {"query": query}) for query in ("zeppelin", "?!", "a")]
        texts = [
            (await fetch(tools, url)).text
            for url in (
                "local://animals/otter.md",
                "local://plants.jsonl/7",
                "https://fern.example/",
                "local://plants.jsonl/3",
            )
        ]
        outside = [await fetch(tools, url) for url in ("local://../x", "https://example.com/", f"file://{library}", "")]
    assert granite.text == (
        "1. Granite is a stone.\n   local://stones.txt\n   Granite is a stone.\n"
        "2. Moss\n   local://plants.jsonl/7\n   Moss grows on granite."
    )
    assert otters.text.startswith("1. The otter\n   local://animals/otter.md\n")
    assert [reply.text for reply in nothing] == ["No results."] * 3
    assert texts[0].endswith("call again with start=200 for more]")
    assert texts[1:] == ["Moss grows on granite.", "Ferns like shade.", "half a ? character"]
    assert [kind(reply) for reply in outside] == ["bad_address"] * 4


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.png", "", "no documents"),
        ("empty.txt", " \n", "no documents"),
        ("rows.jsonl", '{"text": "a"}\n{"title": "b"}\n', "rows.jsonl, line 2.*`text`"),
        ("rows.jsonl", "not json\n", "rows.jsonl, line 1.*JSON"),
        ("rows.jsonl", '{"text": "a", "id": 1}\n{"text": "b", "id": 1}\n', "address of another"),
    ],
)
async def test_a_folder_without_documents_is_refused_at_start(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=f"tool.web.documents={tmp_path}: .*{words}"):
        await LocalSearch(tmp_path).start()


@pytest.mark.parametrize("query", ["", " \n ", "x" * 2000])
async def test_queries_that_ask_nothing_or_too_much_are_said_to(query: str) -> None:
    async with web_tools() as tools:
        assert kind(await tools.call("web_search", {"query": query})) == "bad_request"
