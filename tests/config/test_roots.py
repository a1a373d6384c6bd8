"""Which folder an option comes from."""

from pathlib import Path

import pytest

from prorl_gym.config.compose import compose
from prorl_gym.config.roots import bundle, search_roots
from prorl_gym.errors import ConfigError

MINE = """\
# @package _global_
gym:
  mine: {resources_servers: {mine: {entrypoint: app.py, domain: other, colour: TINT}}}
  mine_agent:
    responses_api_agents:
      tool_calling: {resources_server: {type: resources_servers, name: mine}, tools: [bash]}
"""


def test_the_variable_comes_first_then_a_marked_working_directory_then_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, here = (tmp_path / name for name in ("first", "second", "here"))
    for folder in (first, second, here):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("PRORL_GYM_ROOTS", f"../first:{second}:{first}")
    assert [root.path for root in search_roots()] == [first, second, bundle()]
    (here / "prorl_gym_root").touch()
    roots = search_roots()
    assert [root.path for root in roots] == [first, second, here, bundle()]
    assert [root.origin for root in roots] == ["PRORL_GYM_ROOTS"] * 2 + ["working directory", "bundle"]


def test_a_root_that_is_no_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_GYM_ROOTS", "/no/such/folder")
    with pytest.raises(ConfigError, match="PRORL_GYM_ROOTS: '/no/such/folder' is not a folder"):
        search_roots()


def test_an_environment_of_a_user_root_is_found_and_says_where_it_came_from(user_root: Path) -> None:
    (user_root / "conf/environment/mine.yaml").write_text(MINE.replace("TINT", "red"))
    composition = compose(["environment=[math,mine]"])
    assert [environment.name for environment in composition.config.environments] == ["math_agent", "mine_agent"]
    (mine,) = [e for e in composition.config.environments if e.name == "mine_agent"]
    assert mine.resources is not None
    assert mine.resources.own_fields == {"colour": "red"}
    assert composition.config.roots == (user_root, bundle())
    assert f"environment/mine from {user_root}/conf (PRORL_GYM_ROOTS)" in composition.sources
    assert f"environment/math from {bundle()}/conf (bundle)" in composition.sources


def test_a_user_root_shadows_options_but_never_the_primary_configuration(user_root: Path) -> None:
    (user_root / "conf/runtime").mkdir()
    (user_root / "conf/runtime/local.yaml").write_text("kind: local\nworkdir: /shadowed\n")
    (user_root / "conf/config.yaml").write_text("server: {port: 1}\n")
    composition = compose(["runtime=local"])
    assert composition.config.runtime.workdir == "/shadowed"
    assert composition.config.server.port == 8006
    assert f"config from {bundle()}/conf (bundle)" in composition.sources


def test_the_earlier_root_wins(user_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = tmp_path / "later"
    (later / "conf/environment").mkdir(parents=True)
    (user_root / "conf/environment/mine.yaml").write_text(MINE.replace("TINT", "red"))
    (later / "conf/environment/mine.yaml").write_text(MINE.replace("TINT", "blue"))
    monkeypatch.setenv("PRORL_GYM_ROOTS", f"{user_root}:{later}")
    (mine,) = compose(["environment=[mine]"]).config.environments
    assert mine.resources is not None
    assert mine.resources.own_fields == {"colour": "red"}


def test_a_broken_file_is_named(user_root: Path) -> None:
    (user_root / "conf/environment/mine.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match=r"environment/mine\.yaml"):
        compose(["environment=[mine]"])


def test_an_environment_without_code_is_refused(user_root: Path) -> None:
    (user_root / "conf/environment/mine.yaml").write_text(MINE.replace("{mine: {", "{mne: {").replace("TINT", "red"))
    with pytest.raises(ConfigError, match=r"resources_servers/mne is in no search root.*did you mean mine"):
        compose(["environment=[mine]"])
