from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from runtimes.sandboxes import prepared_factory

from prorl_gym.runtimes.base import Runtime, SandboxSpec


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(state: Path) -> AsyncIterator[Runtime]:
    async with prepared_factory(state, "bubblewrap") as factory, factory.create(SandboxSpec(kind="bubblewrap")) as made:
        yield made
