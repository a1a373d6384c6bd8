"""Making each image once, whoever asks and whatever dies; listing and pruning. Apptainer is a stand-in that copies."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_gym.cli import main
from prorl_gym.config.models import ProrlConfig
from prorl_gym.errors import ConfigError
from prorl_gym.runtimes.images import RuntimeImageBuilder
from prorl_gym.runtimes.images.program import ImageError

Config = Callable[..., ProrlConfig]
StandIn = Callable[..., Path]
DAY_S = 86_400


def command(tmp_path: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "prorl_gym", "images", *arguments, *settings(tmp_path)]


def settings(tmp_path: Path) -> list[str]:
    return [f"paths.state={tmp_path}/state", f"paths.images={tmp_path}/images"]


def live_in_group(group: int) -> list[str]:
    """Processes of a group that run; those that have ended and wait for their parent's look do not count."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, _, its_group, *_ = rest.split()
            if int(its_group) == group and state != "Z":
                found.append(name)
    return found


@pytest.fixture
def at_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRORL_GYM_ROOTS", str(root))
    return root


@pytest.mark.usefixtures("at_root")
async def test_many_processes_and_tasks_build_once(tmp_path: Path, config: Config, stand_in: StandIn) -> None:
    release = tmp_path / "release"
    calls = stand_in(f"while [ ! -e {release} ]; do sleep 0.02; done")
    others = [
        await asyncio.create_subprocess_exec(*command(tmp_path, "build", "toy/box"), stdout=asyncio.subprocess.PIPE)
        for _ in range(2)
    ]
    builder = RuntimeImageBuilder(config())
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        mine = [group.create_task(builder.build("toy/box")) for _ in range(4)]
        while not calls.read_text():
            await asyncio.sleep(0.02)
        release.touch()
    printed = [(await other.communicate())[0].decode() for other in others]
    assert [other.returncode for other in others] == [0, 0]
    assert len(calls.read_text().splitlines()) == 1
    assert len({task.result().path for task in mine}) == 1
    assert sum(task.result().made for task in mine) + sum("1 built" in text for text in printed) == 1


@pytest.mark.usefixtures("at_root")
async def test_a_killed_builder_leaves_nothing_that_counts(tmp_path: Path, config: Config, stand_in: StandIn) -> None:
    release = tmp_path / "release"
    calls = stand_in(f"while [ ! -e {release} ]; do sleep 0.02; done; touch {tmp_path}/orphan_ended")
    first = subprocess.Popen(command(tmp_path, "build", "toy/box"), stdout=subprocess.DEVNULL)
    async with asyncio.timeout(60):
        while not calls.read_text():
            await asyncio.sleep(0.02)
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert RuntimeImageBuilder(config()).store.images() == []
        release.touch()
        assert (await RuntimeImageBuilder(config()).build("toy/box")).made
        while not (tmp_path / "orphan_ended").exists():
            await asyncio.sleep(0.02)
    assert len(RuntimeImageBuilder(config()).store.images()) == 1
    assert list((tmp_path / "images/partial").iterdir()) == []
    assert list((tmp_path / "images/locks").iterdir()) == []


async def test_a_cancelled_build_ends_its_processes_and_frees_the_lock(
    tmp_path: Path, config: Config, stand_in: StandIn
) -> None:
    calls = stand_in(f"echo $$ >{tmp_path}/pid; sleep 600 & wait")
    building = asyncio.create_task(RuntimeImageBuilder(config()).build("toy/box"))
    async with asyncio.timeout(30):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.02)
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building
        while live_in_group(int((tmp_path / "pid").read_text())):
            await asyncio.sleep(0.02)
    assert calls.read_text()
    assert list((tmp_path / "images/partial").iterdir()) == []
    stand_in()
    async with asyncio.timeout(10):
        assert (await RuntimeImageBuilder(config()).build("toy/box")).made


async def test_a_failed_build_says_what_apptainer_said(tmp_path: Path, config: Config, stand_in: StandIn) -> None:
    stand_in("echo 'FATAL: no space left' >&2; exit 3")
    with pytest.raises(ImageError, match=r"status 3:\n.*FATAL: no space left"):
        await RuntimeImageBuilder(config()).build("toy/box")
    stand_in("sleep 600")
    with pytest.raises(ImageError, match=r"not done after 0\.2 s"):
        await RuntimeImageBuilder(config(timeout_s=0.2)).build("toy/box")
    assert RuntimeImageBuilder(config()).store.images() == []
    assert list((tmp_path / "images/partial").iterdir()) == []


@pytest.mark.usefixtures("at_root")
def test_a_store_that_cannot_be_written_is_said(
    tmp_path: Path, stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in()
    (tmp_path / "file").touch()
    assert main(["images", "build", "toy/box", *settings(tmp_path), f"paths.images={tmp_path}/file/images"]) == 1
    assert f"error: toy/box: cannot be written to {tmp_path}/file/images: " in capsys.readouterr().err


async def test_without_apptainer_one_is_told_how_to_get_it(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apptainer is not on PATH"):
        await RuntimeImageBuilder(config()).build("toy/box")


async def test_nothing_of_the_hosts_environment_or_home_is_used(
    tmp_path: Path, config: Config, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    stand_in(f"env >{tmp_path}/env")
    await RuntimeImageBuilder(config()).build("toy/box")
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    assert "SECRET_TOKEN" not in seen
    for name in ("HOME", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR", "APPTAINER_CONFIGDIR"):
        assert seen[name].startswith(f"{tmp_path}/state/apptainer/")
    assert not (tmp_path / "home").exists()


async def test_what_is_not_there_is_named_with_the_command_that_gets_it(
    config: Config, stand_in: StandIn, tmp_path: Path
) -> None:
    stand_in()
    builder = RuntimeImageBuilder(config())
    with pytest.raises(ConfigError, match="images build toy/box"):
        await builder.locate("toy/box")
    with pytest.raises(ConfigError, match="images pull 'docker://box:1'"):
        await builder.locate("box:1")
    with pytest.raises(ConfigError, match="No such file"):
        await builder.locate("/nowhere.sif")
    folder = tmp_path / "rootfs"
    folder.mkdir()
    assert await builder.locate(str(folder)) == folder
    pulled = await RuntimeImageBuilder(config()).pull(f"localimage:{folder}")
    assert await builder.locate(f"localimage:{folder}") == pulled.path


def rows(path: Path, *images: str | None) -> str:
    path.write_text(
        "".join(json.dumps({"docker_image": image} if image else {"question": "?"}) + "\n" for image in images)
    )
    return str(path)


def test_pull_fetches_what_rows_name_and_names_each_failure(
    tmp_path: Path, stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("good", "other", "secret"):
        (tmp_path / "rootfs" / name).mkdir(parents=True)
    stand_in()
    there, secret = tmp_path / "rootfs/good", tmp_path / "rootfs/secret"
    file = rows(
        tmp_path / "rows.jsonl", f"localimage:{there}", None, f"localimage:{tmp_path}/rootfs/other",
        f"localimage:{secret}", f"localimage:{there}", f"localimage:{tmp_path}/rootfs/missing", "docker://evil:1",
    )  # fmt: skip
    arguments = ["images", "pull", file, f'images.allow=["localimage:{tmp_path}/rootfs/[gom]*"]', *settings(tmp_path)]
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert "[3/3]" in out
    assert "2 fetched, 0 there already, 3 failed" in out
    assert f"rows.jsonl:4: image 'localimage:{secret}' is not allowed" in err
    assert "rows.jsonl:7: image 'docker://evil:1' is not allowed" in err
    assert "rootfs/missing: image" in err
    assert main(["images", "pull", rows(tmp_path / "rows.jsonl", f"localimage:{there}"), *arguments[3:]]) == 0
    assert "0 fetched, 1 there already, 0 failed" in capsys.readouterr().out


def test_pull_is_bounded(tmp_path: Path, stand_in: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    stand_in(f"touch {inside}/$$; ls {inside} | wc -l >>{tmp_path}/counts; sleep 0.1; rm {inside}/$$")
    sources = [tmp_path / f"rootfs{number}" for number in range(7)]
    for source in sources:
        source.mkdir()
    names = [f"localimage:{source}" for source in sources]
    assert main(["images", "pull", *names, "images.parallel=3", *settings(tmp_path)]) == 0
    assert "[7/7]" in capsys.readouterr().out
    counts = [int(line) for line in (tmp_path / "counts").read_text().split()]
    assert len(counts) == 7
    assert 2 <= max(counts) <= 3


async def test_scratch_fetches_a_tag_anew(config: Config, tmp_path: Path, stand_in: StandIn) -> None:
    source = tmp_path / "rootfs"
    source.mkdir()
    stand_in()
    first = await RuntimeImageBuilder(config()).pull(f"localimage:{source}")
    fresh = await RuntimeImageBuilder(config(mode="scratch")).pull(f"localimage:{source}")
    assert first.path != fresh.path
    assert await RuntimeImageBuilder(config()).locate(f"localimage:{source}") == fresh.path


@pytest.mark.usefixtures("at_root")
async def test_list_and_prune(
    tmp_path: Path, config: Config, stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in()
    builder = RuntimeImageBuilder(config())
    old = await builder.build("toy/box")
    fresh = await RuntimeImageBuilder(config(mode="scratch")).build("toy/box")
    assert old.image is not None
    long_ago = time.time() - 40 * DAY_S
    os.utime(old.image.folder / "record.json", (long_ago, long_ago))
    left = tmp_path / "images/partial/dead-1"
    left.mkdir()
    os.utime(left, (long_ago, long_ago))

    def run(*arguments: str) -> str:
        assert main(["images", *arguments, *settings(tmp_path)]) == 0
        return capsys.readouterr().out

    def listed() -> list[str]:
        return [image["path"] for image in json.loads(run("list", "--json"))["images"]]

    table = await asyncio.to_thread(run, "list")
    assert "toy/box" in table and "40.0 d" in table and "2 images" in table
    assert "definitions not built: tool_calling/python" in table
    assert "would remove" in await asyncio.to_thread(run, "prune", "--dry-run")
    assert await asyncio.to_thread(listed) == [str(fresh.path), str(old.path)]
    pruned = await asyncio.to_thread(run, "prune")
    assert str(old.image.folder) in pruned and str(left) in pruned
    assert await asyncio.to_thread(listed) == [str(fresh.path)]
    await builder.locate("toy/box")  # a use that prune sees
    assert "0 B freed" in await asyncio.to_thread(run, "prune", "days=1")
    await asyncio.to_thread(run, "prune", "days=0")
    assert await asyncio.to_thread(listed) == []
    assert not [path for path in (tmp_path / "images").rglob("*") if not path.is_dir()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no action"),
        (["bild"], "did you mean build"),
        (["list", "--jsn"], "did you mean --json"),
        (["build", "toy/bix"], "no image definition 'toy/bix'; did you mean toy/box"),
        (["pull"], "name a data set"),
        (["pull", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["prune", "days=soon"], "a number of days"),
        (["show"], "name one definition"),
    ],
)
@pytest.mark.usefixtures("at_root")
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["images", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("at_root")
def test_show_prints_the_definition(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["images", "show", "toy/box", 'images.values={toy/box: {greeting: "two words"}}']) == 0
    assert "echo 'two words' > /opt/greeting" in capsys.readouterr().out


def test_the_readmes_commands(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    block = readme.partition("```bash images\n")[2].partition("```")[0]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e"], input=block, env={"PATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Bootstrap: docker\nFrom: python:3.11" in done.stdout


def test_a_row_cannot_leave_what_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rows(tmp_path / "rows.jsonl", "/images/../etc/secret.sif")
    assert main(["images", "pull", file, 'images.allow=["/images/*"]', *settings(tmp_path)]) == 1
    assert "rows.jsonl:1: image '/images/../etc/secret.sif' is not allowed" in capsys.readouterr().err
