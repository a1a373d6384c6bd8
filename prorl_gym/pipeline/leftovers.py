"""What could not be ended in time: shown until it is gone, never forgotten.

The invariant: an entry leaves the list only when its work has really ended.
"""

import asyncio
import logging
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prorl_gym.handlers.base import Stoppable

logger = logging.getLogger("prorl_gym.pipeline")

RETRY_S = 10.0
"""Between attempts to stop a resource whose stop failed."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that outlived its job.

    Attributes:
        kind: `handler`: code that ignores its cancel. `resource`: its stop failed or does not return.
        what: In words.
        since: Unix time in seconds.
    """

    kind: Literal["handler", "resource"]
    job_id: str
    what: str
    since: float


class Leftovers:
    """The list, and the tasks that wait for each entry to end."""

    def __init__(self) -> None:
        self._entries: dict[asyncio.Task[Any], Leftover] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def handlers(self) -> int:
        """How many calls of handler code were abandoned and still run."""
        return sum(entry.kind == "handler" for entry in self._entries.values())

    def entries(self) -> list[dict[str, Any]]:
        """For `/status`."""
        return [asdict(entry) for entry in self._entries.values()]

    def abandon_handler(self, task: "asyncio.Task[Any]", job_id: str) -> None:
        """Keep a call that ignored its cancel."""
        self._keep(task, Leftover("handler", job_id, task.get_name(), time.time()))

    def abandon_stop(self, stopping: "asyncio.Task[Any]", resource: Stoppable, job_id: str) -> None:
        """Keep a resource whose stop takes too long, or has failed; a failed one is tried again until it works."""
        task = asyncio.get_running_loop().create_task(self._stop_at_last(stopping, resource, job_id))
        self._keep(task, Leftover("resource", job_id, f"stop of {type(resource).__name__}", time.time()))

    def _keep(self, task: "asyncio.Task[Any]", entry: Leftover) -> None:
        logger.warning("left over: %s of job %s", entry.what, entry.job_id, extra={"job_id": entry.job_id})
        self._entries[task] = entry
        task.add_done_callback(self._gone)

    def _gone(self, task: "asyncio.Task[Any]") -> None:
        entry = self._entries.pop(task)
        if not task.cancelled():
            task.exception()
        logger.info("no longer left over: %s of job %s", entry.what, entry.job_id, extra={"job_id": entry.job_id})

    async def _stop_at_last(self, stopping: "asyncio.Task[Any]", resource: Stoppable, job_id: str) -> None:
        while True:
            await asyncio.wait([stopping])
            if stopping.cancelled() or (error := stopping.exception()) is None:
                return
            logger.warning("stop of %s failed: %s", type(resource).__name__, error, extra={"job_id": job_id})
            await asyncio.sleep(RETRY_S)
            stopping = asyncio.get_running_loop().create_task(resource.stop())
