"""Definitions: found by path, rendered strictly, with values that stay one word whatever they hold."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_gym.config.models import ProrlConfig
from prorl_gym.config.roots import bundle
from prorl_gym.errors import ConfigError
from prorl_gym.runtimes.images import RuntimeImageBuilder
from prorl_gym.runtimes.images.definition import find_definitions
from prorl_gym.runtimes.images.source import parse_source

Config = Callable[..., ProrlConfig]
HOSTILE = [
    "$(touch owned)", "`touch owned`", "; touch owned", "a'b", 'a"b', "'; touch owned; '", "%setup", "{{ x }}",
    "{{{", "}}", "back\\", "# comment", "*", "~", "-n", "", "a  b", "$HOME", "ünïcödé", "'{{'", "a=b",
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_reaches_the_shell_as_one_word(value: str, config: Config, root: Path, tmp_path: Path) -> None:
    template = root / "resources_servers/toy/images/box.def.j2"
    template.write_text("%post\n{{ greeting }} {{ items }}\n")
    text = RuntimeImageBuilder(
        config(values={"toy/box": {"greeting": "printf", "items": ["[%s]", value, value]}})
    ).render("toy/box")
    body = text.removeprefix("%post\n")
    done = subprocess.run(
        ["sh", "-c", body], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True
    )
    assert done.stdout.decode() == f"[{value}][{value}]"
    assert not (tmp_path / "owned").exists()
    assert "{{" not in text  # Apptainer would take it for a build argument
    assert not any(line.strip().startswith("%") for line in body.splitlines())


def test_a_value_cannot_open_a_section(config: Config, root: Path) -> None:
    (root / "resources_servers/toy/images/box.def.j2").write_text("%post\n{{ greeting }}\n")
    assert (
        RuntimeImageBuilder(config(values={"toy/box": {"greeting": "%setup"}})).render("toy/box") == "%post\n'%setup'\n"
    )
    for value in ("x\n%setup\ntouch /owned", "a\rb", "\x00", "a\u2028b"):
        with pytest.raises(ConfigError, match="line break or a control character"):
            RuntimeImageBuilder(config(values={"toy/box": {"greeting": value}})).render("toy/box")
    for wrong in (None, True, {"a": 1}):
        with pytest.raises(ConfigError, match="must be a text, a number or a list"):
            RuntimeImageBuilder(config(values={"toy/box": {"greeting": wrong}})).render("toy/box")


def test_mistakes_name_file_and_value(config: Config, root: Path) -> None:
    folder = root / "resources_servers/toy/images"
    (folder / "box.yaml").write_text("base: docker://box:1\n")
    with pytest.raises(ConfigError, match=r"box\.def\.j2.*'greeting' is undefined"):
        RuntimeImageBuilder(config()).render("toy/box")
    (folder / "box.yaml").write_text("bas: docker://box:1\n")
    with pytest.raises(ConfigError, match=r"box\.yaml: bas: unknown key; did you mean base\?"):
        RuntimeImageBuilder(config())
    (folder / "box.yaml").write_text("base: docker://box:1\nlock: nowhere.lock\nvalues: {greeting: x}\n")
    with pytest.raises(ConfigError, match=r"toy/box.*nowhere\.lock"):
        RuntimeImageBuilder(config())._recipe(find_definitions([root])["toy/box"])
    (folder / "box.def.j2").write_text("{{ base }}\n{% if %}\n")
    with pytest.raises(ConfigError, match=r"box\.def\.j2, line 2"):
        RuntimeImageBuilder(config()).render("toy/box")
    with pytest.raises(ConfigError, match="'toy/bax'; did you mean toy/box"):
        RuntimeImageBuilder(config(bases={"toy/bax": "docker://x"}))


def test_the_first_root_wins_and_a_clash_inside_one_is_an_error(root: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    for kind, name in (("resources_servers/toy", "box"), ("agents/robot", "arm")):
        (second / kind / "images").mkdir(parents=True)
        (second / kind / "images" / f"{name}.def.j2").write_text("other\n")
    found = find_definitions([root, second])
    assert list(found) == ["robot/arm", "toy/box"]
    assert found["toy/box"].template.is_relative_to(root)
    (second / "agents/toy/images").mkdir(parents=True)
    (second / "agents/toy/images/box.def.j2").write_text("clash\n")
    with pytest.raises(ConfigError, match="two definitions are called toy/box"):
        find_definitions([root, second])


def test_templates_may_include_their_neighbours(config: Config, root: Path) -> None:
    folder = root / "resources_servers/toy/images"
    (folder / "tail.j2").write_text("%labels\n    by {{ greeting }}\n")
    (folder / "box.def.j2").write_text("{{ base }}\n{% include 'tail.j2' %}")
    assert RuntimeImageBuilder(config()).render("toy/box").endswith("%labels\n    by hello\n")


@pytest.mark.parametrize(
    ("text", "canonical", "header"),
    [
        ("docker://python:3.11", "docker://python:3.11", "Bootstrap: docker\nFrom: python:3.11"),
        ("swebench/sweb.eval.x86_64.a_1776_b:latest", "docker://swebench/sweb.eval.x86_64.a_1776_b:latest", None),
        ("host:5000/a/b@sha256:0123", "docker://host:5000/a/b@sha256:0123", None),
        ("oras://ghcr.io/a/b:1", "oras://ghcr.io/a/b:1", "Bootstrap: oras\nFrom: ghcr.io/a/b:1"),
        ("localimage:/i/a b.sif", "localimage:/i/a b.sif", "Bootstrap: localimage\nFrom: /i/a b.sif"),
        ("localimage:///i/x", "localimage:/i/x", None),
        ("/i/x.sif", "/i/x.sif", "Bootstrap: localimage\nFrom: /i/x.sif"),
        ("oci-archive:/i/x.tar", "oci-archive:/i/x.tar", "Bootstrap: oci-archive\nFrom: /i/x.tar"),
        ("docker-archive:/i/x.tar", "docker-archive:/i/x.tar", None),
        ("debootstrap:bookworm@http://deb.debian.org/debian", "debootstrap:bookworm@http://deb.debian.org/debian",
         "Bootstrap: debootstrap\nOSVersion: bookworm\nMirrorURL: http://deb.debian.org/debian"),
    ],
)  # fmt: skip
def test_sources(text: str, canonical: str, header: str | None) -> None:
    source = parse_source(text)
    assert str(source) == canonical
    assert parse_source(canonical) == source
    assert header is None or source.header() == header


@pytest.mark.parametrize(
    "text",
    [
        "", "-x", "--fakeroot", "a b", "docker://x\n%setup", "localimage:relative.sif", "/a\nb", "/a{{ x }}",
        "http://x/y.sif", "library://a/b", "docker://", "oras:x/y:1 z", "debootstrap:bookworm",
        "debootstrap:b@file:///etc", "shub://a", "../x", "/images/../x.sif",
    ],
)  # fmt: skip
def test_what_is_no_source(text: str) -> None:
    with pytest.raises(ConfigError, match="localimage:/FILE"):
        parse_source(text)


def test_what_we_ship_renders() -> None:
    definitions = find_definitions([bundle()])
    assert "tool_calling/python" in definitions
    for definition in definitions.values():
        base = definition.settings.base
        text = definition.render(base and parse_source(base), definition.settings.values, "1.0")
        assert "Bootstrap:" in text.splitlines()[0]
        definition.lock_digest()
        definition.sources_digest()
