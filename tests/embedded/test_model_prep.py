"""Getting a model: folders as they are, the demo model once, and errors that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prorl_gym.embedded import model_prep
from prorl_gym.embedded.model_prep import DEFAULT_MODEL, GgufWheel, prepare
from prorl_gym.errors import ConfigError

from .reference import Reference

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_model.py"


class FakeConversion:
    """Stands in for the download and the conversion, which take half a minute."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.downloads = 0
        self.fails = False
        self.go = threading.Event()
        monkeypatch.setattr(model_prep, "_download", self.download)
        monkeypatch.setattr(model_prep, "_run", self.convert)

    def download(self, wheel: GgufWheel, target: Path) -> Path:
        self.downloads += 1
        return target / wheel.gguf

    def convert(self, command: list[str], timeout_s: float) -> None:
        assert self.go.wait(10)
        folder = Path(command[-1])
        folder.mkdir()
        (folder / "config.json").write_text("half")
        if self.fails:
            raise ConfigError("no space left")
        (folder / "config.json").write_text("whole")


def test_a_local_folder_is_used_as_it_is(tiny_model: Path) -> None:
    assert prepare(str(tiny_model)) == tiny_model


def test_what_is_no_model_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        prepare(str(tmp_path))
    with pytest.raises(ConfigError, match=f"expected {DEFAULT_MODEL}, an existing folder, or a hub id"):
        prepare(str(tmp_path / "missing"))


def test_a_hub_that_gives_nothing_says_what_would_help() -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    refused = subprocess.run(
        [sys.executable, str(SCRIPT), "no-such-owner/no-such-model"], env=environment, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: model 'no-such-owner/no-such-model'")
    assert "HF_ENDPOINT" in refused.stderr


def test_two_at_once_prepare_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = FakeConversion(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(prepare, DEFAULT_MODEL, tmp_path) for _ in range(2)]
        conversion.go.set()
        folders = {future.result() for future in both}
    (folder,) = folders
    assert (folder / "config.json").read_text() == "whole"
    assert conversion.downloads == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [folder.name]


def test_a_failed_preparation_leaves_nothing_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = FakeConversion(monkeypatch)
    conversion.go.set()
    conversion.fails = True
    # What a killed process left behind.
    (tmp_path / ".SmolLM2-135M-Instruct-dead").mkdir()
    with pytest.raises(ConfigError, match="no space left"):
        prepare(DEFAULT_MODEL, tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    conversion.fails = False
    assert (prepare(DEFAULT_MODEL, tmp_path) / "config.json").read_text() == "whole"


def test_another_file_in_the_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(command: list[str], timeout_s: float) -> None:
        gguf = Path(command[command.index("--target") + 1]) / model_prep.WHEELS[DEFAULT_MODEL].gguf
        gguf.parent.mkdir(parents=True)
        gguf.write_bytes(b"something else")

    monkeypatch.setattr(model_prep, "_run", install)
    with pytest.raises(ConfigError, match="sha256"):
        prepare(DEFAULT_MODEL, tmp_path)


@pytest.mark.slow
def test_the_demo_model_is_prepared_for_real(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = prepare(DEFAULT_MODEL, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("a   9") == [81, 333, 41]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert "Paris" in tokenizer.decode(Reference(folder).greedy(prompt, 12))
