"""What the backend tests share: quick bounds, and a job that records its waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prorl_gym.backends.pool import BackendPool
from prorl_gym.config.models import BackendConfig
from prorl_gym.tokens.records import GenerateParams

PROMPT = [1, 2, 3]
PARAMS = GenerateParams(max_tokens=64)


class Waits:
    """Stands for a job's timer: records when it was paused."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.paused = False

    @asynccontextmanager
    async def __call__(self, reason: str) -> AsyncIterator[None]:
        self.reasons.append(reason)
        self.paused = True
        try:
            yield
        finally:
            self.paused = False


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
async def make_pool() -> AsyncIterator[Callable[..., BackendPool]]:
    pools: list[BackendPool] = []

    def make(**settings: Any) -> BackendPool:
        quick = {"connect_timeout_s": 2.0, "health_interval_s": 0.2, "unhealthy_wait_s": 1.0, "wait_s": 5.0}
        pools.append(BackendPool(BackendConfig(**{**quick, **settings}), "default"))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.stop()
