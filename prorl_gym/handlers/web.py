"""From configuration to the web tools that all environments share."""

from importlib.util import find_spec
from pathlib import Path

from prorl_gym.config.models import ProrlConfig, WebConfig
from prorl_gym.errors import ConfigError
from prorl_gym.resources.confine import Confinement
from prorl_gym.resources.graders import GraderPool
from prorl_gym.runtimes.bubblewrap import bubblewrap_program
from prorl_gym.tools.web.local import LocalSearch
from prorl_gym.tools.web.provider import SearchProvider
from prorl_gym.tools.web.searxng import SearxngSearch
from prorl_gym.tools.web.specs import WEB_TOOLS
from prorl_gym.tools.web.tavily import TavilySearch
from prorl_gym.tools.web.tools import WebTools

EXTRACTION = Path(__file__).parents[1] / "tools" / "web" / "extraction.py"
READ_TIMEOUT_S = 10.0


def web_tools(config: ProrlConfig) -> WebTools | None:
    """The web tools, not started; None when no environment names any.

    Raises:
        ConfigError: The provider lacks a setting, a key or an installed package.
    """
    if not any(name in WEB_TOOLS for environment in config.environments for name in environment.agent.tools):
        return None
    web = config.tool.web
    provider = _provider(web)
    return WebTools(web, provider, None if web.provider == "local" else page_reader(config))


def page_reader(config: ProrlConfig) -> GraderPool:
    """Workers that make text of pages, shut in like graders.

    Raises:
        ConfigError: The library is not installed.
    """
    _require("trafilatura", "web_fetch")
    bare = config.runtime.kind == "local"
    confine = None if bare else Confinement(bubblewrap_program(config.paths.state))
    return GraderPool(EXTRACTION, confine, timeout_s=READ_TIMEOUT_S)


def _provider(web: WebConfig) -> SearchProvider:
    if web.provider == "local":
        if web.documents is None:
            raise ConfigError("tool.web.provider=local needs tool.web.documents=FOLDER (or choose searxng or tavily)")
        _require("bm25s", "tool.web.provider=local")
        return LocalSearch(web.documents)
    if web.provider == "searxng":
        if web.address is None:
            raise ConfigError("tool.web.provider=searxng needs tool.web.address=http://HOST:PORT of the instance")
        return SearxngSearch(web.address)
    if web.api_key_env is None:
        raise ConfigError("tool.web.provider=tavily needs tool.web.api_key_env=NAME of the variable with its key")
    return TavilySearch(web.address, web.api_key_env)


def _require(package: str, what: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"{what} needs the package {package}: pip install 'prorl-gym[web]'")
