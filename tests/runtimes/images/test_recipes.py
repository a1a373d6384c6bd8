"""When an image is built again: the whole table, through the builder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_gym.config.models import ProrlConfig
from prorl_gym.runtimes.images import RuntimeImageBuilder

Config = Callable[..., ProrlConfig]
FOLDER = "resources_servers/toy/images"

REBUILT = {
    ("scratch", "nothing"), ("scratch", "lock file"), ("scratch", "base"), ("scratch", "framework version"),
    ("scratch", "source"), ("scratch", "definition"), ("scratch", "value"), ("scratch", "format"),
    ("versioned", "base"), ("versioned", "framework version"), ("versioned", "definition"), ("versioned", "value"),
    ("versioned", "format"),
    ("lock", "base"), ("lock", "lock file"), ("lock", "definition"), ("lock", "value"), ("lock", "format"),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["scratch", "versioned", "lock"])
@pytest.mark.parametrize(
    "change", ["nothing", "lock file", "base", "framework version", "source", "definition", "value", "format"]
)
async def test_table(mode: str, change: str, config: Config, root: Path, stand_in: Callable[..., Path]) -> None:
    calls = stand_in()
    first = await RuntimeImageBuilder(config(mode=mode), framework_version="1.0").build("toy/box")
    settings: dict[str, object] = {"mode": mode}
    version = "1.0"
    match change:
        case "lock file":
            (root / FOLDER / "box.lock").write_text("one==2\n")
        case "base":
            settings["bases"] = {"toy/box": "docker://box:2"}
        case "framework version":
            version = "1.1"
        case "source":
            (root / FOLDER / "tool.sh").write_text("echo another\n")
        case "definition":
            with (root / FOLDER / "box.def.j2").open("a") as template:
                template.write("    echo more\n")
        case "value":
            settings["values"] = {"toy/box": {"greeting": "bye"}}
        case "format":
            settings["format"] = "directory"
    second = await RuntimeImageBuilder(config(**settings), framework_version=version).build("toy/box")
    rebuilt = (mode, change) in REBUILT
    assert first.made
    assert second.made is rebuilt
    assert len(calls.read_text().splitlines()) == 1 + rebuilt
    assert (second.path != first.path) is rebuilt
    assert first.path.exists()  # whoever runs the old one keeps it
    expected_stale = {("versioned", "lock file"): ("lock file",)} | {
        (m, "source"): ("sources",) for m in ("versioned", "lock")
    }
    assert second.stale == (() if rebuilt else expected_stale.get((mode, change), ()))


async def test_a_definition_without_lock_file_is_kept_until_its_base_changes(
    config: Config, root: Path, stand_in: Callable[..., Path]
) -> None:
    stand_in()
    (root / FOLDER / "box.yaml").write_text("base: docker://box:1\nvalues: {greeting: hello}\n")
    assert (await RuntimeImageBuilder(config()).build("toy/box")).made
    assert not (await RuntimeImageBuilder(config()).build("toy/box")).made
    assert (await RuntimeImageBuilder(config(bases={"toy/box": "docker://box:2"})).build("toy/box")).made


async def test_a_fresh_build_is_what_every_mode_then_finds(config: Config, stand_in: Callable[..., Path]) -> None:
    stand_in()
    old = await RuntimeImageBuilder(config(mode="lock")).build("toy/box")
    fresh = await RuntimeImageBuilder(config(mode="scratch")).build("toy/box")
    assert fresh.path != old.path
    for mode in ("scratch", "versioned", "lock"):
        assert await RuntimeImageBuilder(config(mode=mode)).locate("toy/box") == fresh.path


async def test_a_local_base_counts_by_its_content(
    config: Config, tmp_path: Path, stand_in: Callable[..., Path]
) -> None:
    stand_in()
    base = tmp_path / "base"
    base.mkdir()
    (base / "file").write_text("1")
    builder = RuntimeImageBuilder(config(bases={"toy/box": f"localimage:{base}"}))
    assert (await builder.build("toy/box")).made
    assert not (await builder.build("toy/box")).made
    (base / "file").write_text("22")
    assert (await builder.build("toy/box")).made


async def test_the_version_in_a_label_does_not_rebuild_under_lock(
    config: Config, root: Path, stand_in: Callable[..., Path]
) -> None:
    stand_in()
    with (root / FOLDER / "box.def.j2").open("a") as template:
        template.write("\n%labels\n    version {{ framework_version }}\n")
    first = await RuntimeImageBuilder(config(mode="lock"), framework_version="1.0").build("toy/box")
    assert "version 1.0" in first.path.read_text()
    assert not (await RuntimeImageBuilder(config(mode="lock"), framework_version="2.0").build("toy/box")).made
