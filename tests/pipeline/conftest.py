from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from prorl_gym.handlers.base import AgentHandler
from prorl_gym.pipeline import Pipeline

from .kit import OneHandler, config_of

Serve = Callable[..., Awaitable[Pipeline]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a pipeline for one handler, called `t`, or for several; ends with every one stopped."""
    pipelines: list[Pipeline] = []

    async def start(handler: AgentHandler | None = None, **settings: Any) -> Pipeline:
        handlers = settings.pop("handlers", None) or {"t": handler}
        pipeline = Pipeline(config_of(**settings), OneHandler(**handlers))  # type: ignore[arg-type]
        pipelines.append(pipeline)
        await pipeline.start()
        return pipeline

    yield start
    for pipeline in pipelines:
        await pipeline.stop()
