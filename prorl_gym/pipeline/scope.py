"""What a job's stages leave running, and its bounded end.

The invariant: whatever was adopted is stopped, also when it is adopted after the scope was closed by code that outlived
its job.
"""

import asyncio
import threading
from typing import Any

from prorl_gym.handlers.base import Stoppable
from prorl_gym.pipeline.leftovers import Leftovers
from prorl_gym.pipeline.shield import to_the_end

TEARDOWN_S = 10.0
"""All of a scope's stops together; what takes longer goes on as a leftover."""


class ResourceScope:
    """Resources of one job. `adopt` from any thread, the rest on the event loop."""

    def __init__(self, job_id: str, leftovers: Leftovers, loop: asyncio.AbstractEventLoop) -> None:
        self._job_id = job_id
        self._leftovers = leftovers
        self._loop = loop
        self._resources: list[Stoppable] = []
        self._closed = False
        self._lock = threading.Lock()

    def adopt(self, resource: Stoppable) -> None:
        """Stop `resource` when the scope closes; at once when it has. A second adoption of the same is harmless."""
        with self._lock:
            if not self._closed:
                if not any(known is resource for known in self._resources):
                    self._resources.append(resource)
                return
        self._loop.call_soon_threadsafe(self._stop_late, resource)

    async def close(self) -> None:
        """Stop everything, the last adopted first. Not cut short by a cancel, bounded, idempotent; never fails."""
        cancelled = False
        while not self._closed:
            if self._resources:
                try:
                    await to_the_end(self._stop_all())
                except asyncio.CancelledError:
                    cancelled = True
            with self._lock:  # a thread may have adopted something in this moment
                self._closed = not self._resources
        if cancelled:
            raise asyncio.CancelledError

    async def __aenter__(self) -> None:
        """Nothing to do."""

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    async def _stop_all(self) -> None:
        deadline = self._loop.time() + TEARDOWN_S
        while self._resources:
            resource = self._resources.pop()
            stopping = self._loop.create_task(_stop(resource))
            await asyncio.wait([stopping], timeout=max(0.0, deadline - self._loop.time()))
            if not stopping.done() or stopping.cancelled() or stopping.exception() is not None:
                self._leftovers.abandon_stop(stopping, resource, self._job_id)

    def _stop_late(self, resource: Stoppable) -> None:
        self._leftovers.abandon_stop(self._loop.create_task(_stop(resource)), resource, self._job_id)


async def _stop(resource: Any) -> None:
    ending = resource.stop()
    if asyncio.iscoroutine(ending) or asyncio.isfuture(ending):
        await ending
