import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from prorl_gym.runtimes.base import Runtime, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory

from .sandboxes import prepared_factory


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["local", "bubblewrap"])
async def factory(request: pytest.FixtureRequest, state: Path) -> AsyncIterator[RuntimeFactory]:
    async with prepared_factory(state, request.param) as made:
        made.kind = request.param
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(factory: RuntimeFactory) -> AsyncIterator[Runtime]:
    """One sandbox for the tests that leave it usable."""
    async with factory.create(SandboxSpec(kind=factory.kind)) as made:
        yield made


@pytest.fixture
def eventually() -> Callable:
    async def wait(condition: Callable[[], bool], within_s: float = 5.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "the condition never became true"
            await asyncio.sleep(0.01)

    return wait
