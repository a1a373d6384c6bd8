"""What tests of several parts share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_gym.testing.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def open_state() -> Iterator[Path]:
    """A `paths.state` that every user may pass through, so that all sandboxes of the service lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="prorl_gym-test-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's folder whose tokenizer is the scripted LLM's; served under this name, `policy.model=auto` finds it."""
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), max_model_len=32768))
