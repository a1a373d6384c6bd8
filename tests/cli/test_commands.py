"""What every command says, and how it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from prorl_gym.cli import COMMANDS, main
from prorl_gym.config.roots import bundle

from .conftest import run


def test_help_lists_the_commands_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from prorl_gym.cli import main; code = main(['--help']); "
        "print(sorted({'pydantic', 'hydra', 'rich', 'httpx', 'torch'} & sys.modules.keys())); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *usage, imported = done.stdout.splitlines()
    assert imported == "[]"
    for name in COMMANDS:
        assert any(line.startswith(f"  {name} ") for line in usage)
    assert not {"data", "drift"} & {line.split()[0] for line in usage if line.startswith("  ")}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"usage: python -m prorl_gym {'[serve]' if name == 'serve' else name}" in capsys.readouterr().out


def test_serve_help_lists_every_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "  server.port=8006\n" in shown
    assert "  policy.sampling.max_tokens=4096\n" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollot"], "error: unknown command 'rollot'; did you mean rollout?"),
        (["--port", "3"], "error: unknown option '--port'"),
        (["pipeline.run.wokers=3"], "error: pipeline.run.wokers: unknown key; did you mean pipeline.run.workers?"),
        (["serve", "runtime=docker"], "error: runtime: no option 'docker'"),
        (["rollout", "inptu=x"], "error: inptu: unknown key; did you mean input?"),
        (["rollout", "output=x"], "error: input: this key is required"),
        (["rollout", "input=/no/file", "output=x"], "error: input: cannot read /no/file"),
        (["rollout", "input=a", "output=b", "sampling.max_tokns=3"], "did you mean sampling.max_tokens?"),
        (["rollout", "input=a", "output=b", "server=http://h:1", "runtime=local"], "with server= there is none"),
        (["demo", "environment=[]"], "the demo rolls out math problems"),
        (["gym-root", "x=1"], "gym-root takes no arguments"),
        (["verify"], "verify takes the names of rollout files"),
    ],
)
def test_a_wrong_configuration_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


async def test_no_traceback_reaches_a_user(root: Path) -> None:
    ended = await run("environment=[words]", "server.prot=1", cwd=root)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "error: server.prot: unknown key; did you mean server.port?\n"


async def test_environments_lists_those_of_the_working_directory(root: Path) -> None:
    ended = await run("environments", "environment=[math,words]", cwd=root)
    assert ended.code == 0, ended.err
    rows = {line.split()[0]: line for line in ended.out.splitlines()[1:] if line.strip()}
    assert "ipython" in rows["math_agent"]
    assert "bubblewrap" in rows["math_agent"]
    assert "none" in rows["words_agent"]
    assert f"environment/words from {root}/conf (working directory)" in ended.out


def test_gym_root_is_where_the_environments_lie(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gym-root"]) == 0
    printed = Path(capsys.readouterr().out.strip())
    assert printed == bundle()
    assert (printed / "resources_servers/math/app.py").is_file()
