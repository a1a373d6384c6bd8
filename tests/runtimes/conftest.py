import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from prorl_gym.runtimes.base import Runtime, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory

from .base_image import base_image
from .sandboxes import prepared_factory

APPTAINER = {
    "apptainer-folder": {"image": "base"},
    "apptainer-sif": {"image": "base.sif"},
    "apptainer-fakeroot": {"image": "base.sif", "fakeroot": True},
}
KINDS = ["local", "bubblewrap", *(pytest.param(name, marks=pytest.mark.apptainer) for name in APPTAINER)]


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="session")
def images() -> Path:
    """A folder with the images `base` and `base.sif`."""
    return base_image()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def factory(request: pytest.FixtureRequest, state: Path) -> AsyncIterator[RuntimeFactory]:
    """With `spec`, which makes what `create` wants, of the kind and image that the parameter names."""
    fields = dict(APPTAINER.get(request.param, {}))
    kind = request.param.partition("-")[0]
    if fields:
        fields["image"] = str(request.getfixturevalue("images") / fields["image"])
    async with prepared_factory(state, kind) as made:
        made.spec = partial(SandboxSpec, kind=kind, **fields)
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(factory: RuntimeFactory) -> AsyncIterator[Runtime]:
    """One sandbox for the tests that leave it usable."""
    async with factory.create(factory.spec()) as made:
        yield made


@pytest.fixture
def eventually() -> Callable:
    async def wait(condition: Callable[[], bool], within_s: float = 5.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "the condition never became true"
            await asyncio.sleep(0.01)

    return wait
