"""One tiny model and one server for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_gym.testing import make_tiny_model

from .serving import Server, running


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--served-model-name", "tiny", "--max-num-seqs", "4")
    with running(tiny_model, tmp_path_factory.mktemp("server"), *flags) as server:
        yield server
        # It has served all that time; now its parent dies.
        server.held.close()
        assert server.process.wait(5) == 0
