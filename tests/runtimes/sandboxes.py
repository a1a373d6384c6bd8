"""Sandboxes for tests: a prepared factory, and looking at the host's processes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prorl_gym.config.models import PathsConfig, RuntimeConfig
from prorl_gym.errors import ConfigError
from prorl_gym.runtimes.base import Runtime, RuntimeKind, SandboxSpec
from prorl_gym.runtimes.factory import RuntimeFactory


@asynccontextmanager
async def prepared_factory(state: Path, kind: RuntimeKind) -> AsyncIterator[RuntimeFactory]:
    factory = RuntimeFactory(RuntimeConfig(), PathsConfig(state=state, images=state / "images"))
    try:
        try:
            await factory.prepare([kind])
        except ConfigError as error:
            if kind == "local":
                raise
            pytest.skip(f"this host runs no {kind} sandboxes: {error}")
        yield factory
    finally:
        await factory.stop()


@asynccontextmanager
async def sandbox(state: Path, kind: RuntimeKind, **fields: object) -> AsyncIterator[Runtime]:
    async with prepared_factory(state, kind) as factory, factory.create(SandboxSpec(kind=kind, **fields)) as runtime:
        yield runtime


def spawned(factory: RuntimeFactory) -> str:
    """The spawner's children, as the kernel lists them: the sandboxes, and orphans of dead ones."""
    spawner = factory._host.launcher._process.pid
    return Path(f"/proc/{spawner}/task/{spawner}/children").read_text()


def processes_with(marker: str) -> list[int]:
    """Processes of this host whose command line holds the marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
