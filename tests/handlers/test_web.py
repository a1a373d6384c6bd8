"""Agents that search and read: without a sandbox, through the pipeline, and what is refused at start."""

import base64
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.config.models import ResourcesServerConfig, RuntimeConfig
from prorl_gym.errors import ConfigError, EvaluationError
from prorl_gym.handlers import web as handlers_web
from prorl_gym.handlers.web import page_reader, web_tools
from prorl_gym.server.service import Service
from prorl_gym.testing import Reply, ScriptedLlm
from prorl_gym.types import JobResult

from .kit import ask, call, config_of, environment, serving

TOOLS = {"tools": ["web_search", "web_fetch"]}


def searching(folder: Path, agent: dict[str, Any] | None = None, **web: Any) -> Any:
    """The world's configuration with an agent that searches."""
    resources = ResourcesServerConfig.model_validate({"journal": str(folder / "journal")})
    served = environment({**TOOLS, **(agent or {})}, resources=resources)
    return config_of(folder, served, tool={"web": web})


@pytest.mark.parametrize("sandbox", [None, {}])
async def test_an_agent_searches_reads_and_answers(tmp_path: Path, sandbox: Any) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "otter.md").write_text("# Otters\nOtters hold hands.")
    (library / "fern.md").write_text("# Ferns\nFerns like shade.")
    script = [
        Reply(text=call("web_search", query="otters")),
        Reply(text=call("web_fetch", url="local://otter.md")),
        Reply(text=call("web_fetch", url="http://169.254.169.254/")),
        Reply(text=call("web_fetch", link="x")),
        Reply(text="g"),
    ]
    config = searching(tmp_path, {"sandbox": sandbox}, documents=library)
    async with ScriptedLlm(script) as llm, serving(config, llm) as pipeline:
        outcome = await pipeline.submit(ask(files=False)).wait(timeout_s=30)
    assert outcome is not None
    result = JobResult.model_validate(outcome.result())
    assert (result.status, result.reward) == ("completed", 1.0)
    assert [tool["function"]["name"] for tool in result.tools] == ["web_search", "web_fetch", "press"]
    texts = [message.content for message in result.messages if message.role == "tool"]
    assert texts[0] == "1. Otters\n   local://otter.md\n   # Otters Otters hold hands."
    assert texts[1] == "# Otters\nOtters hold hands."
    assert texts[2].startswith("web_fetch failed: There is no document")
    assert "'url' of web_fetch is missing" in texts[3]


@pytest.mark.parametrize(
    ("web", "words"),
    [
        ({}, "needs tool.web.documents"),
        ({"provider": "searxng"}, "needs tool.web.address"),
        ({"provider": "tavily"}, "needs tool.web.api_key_env"),
        ({"provider": "tavily", "api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY: that environment variable is not set"),
    ],
)
async def test_a_provider_that_lacks_something_is_refused(tmp_path: Path, web: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Service(searching(tmp_path, **web))
    assert web_tools(searching(tmp_path, {"tools": ["bash"]}, **web)) is None


@pytest.mark.parametrize(
    ("package", "web"),
    [
        ("bm25s", {"documents": "/nowhere"}),
        ("trafilatura", {"provider": "searxng", "address": "http://127.0.0.1:1"}),
    ],
)
async def test_a_package_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, web: dict[str, Any]
) -> None:
    monkeypatch.setattr(handlers_web, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"package {package}: pip install 'prorl-gym\[web\]'"):
        web_tools(searching(tmp_path, **web))


@pytest.mark.parametrize(
    ("web", "words"),
    [
        ({"documents": "/nowhere/at/all"}, "tool.web.documents=/nowhere/at/all: no such folder"),
        ({"provider": "searxng", "address": "http://127.0.0.1:1"}, "SearXNG cannot be reached there"),
    ],
)
async def test_a_service_whose_provider_cannot_work_does_not_start(
    tmp_path: Path, web: dict[str, Any], words: str
) -> None:
    service = Service(searching(tmp_path, **web))
    with pytest.raises(ConfigError, match=words):
        await service.start()


async def test_pages_are_read_in_confined_workers(tmp_path: Path) -> None:
    reader = page_reader(searching(tmp_path).model_copy(update={"runtime": RuntimeConfig(kind="bubblewrap")}))
    await reader.start()
    try:
        page = b"<html><head><title>T</title></head><body><p>Caf\xe9.</p></body></html>"
        request = {"body": base64.b64encode(page).decode(), "charset": "latin-1", "html": True, "url": "http://a/"}
        assert await reader.grade(request) == {"title": "T", "text": "Café."}
        with pytest.raises(EvaluationError):
            await reader.grade({"body": "", "html": True})
        assert (await reader.grade({**request, "html": False}))["text"].startswith("<html>")
    finally:
        await reader.stop()
