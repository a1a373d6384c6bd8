"""Makes the rollouts of one file: what `rollout` and `demo` share.

The invariant: a result is on its way to the disk before the next one is waited for; leaving in any way cancels every
job that this run started.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from rich.console import Console

from prorl_gym.client import RolloutClient
from prorl_gym.commands.rollout_file import Assignment, RolloutFile
from prorl_gym.commands.rollout_progress import ProgressView, Tally
from prorl_gym.errors import ProrlGymError, RequestError, ServiceError
from prorl_gym.types import ResultPart

T = TypeVar("T")

INCLUDED: tuple[ResultPart, ...] = ("messages", "segments", "ledger")
_LOOK_EVERY_S = 0.25
_CANCEL_S = 5.0


class RolloutRun:
    """One run over one service.

    Args:
        client: Of the service.
        file: The open output; its open assignments are made.
        console: Where progress is shown.
        check_service: Raises when the service is known to be gone.
        task: None lets each row say it.
        sampling: Sampling parameters that are not the service's defaults.
        timeout_s: Budget per job; None is the service's.
        concurrency: Jobs handed in at once; the service's own pools decide how many run.
    """

    def __init__(
        self,
        client: RolloutClient,
        file: RolloutFile,
        console: Console,
        *,
        check_service: Callable[[], None] = lambda: None,
        task: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        concurrency: int = 256,
    ) -> None:
        self._client = client
        self._file = file
        self._console = console
        self._check_service = check_service
        self._task = task
        self._sampling = sampling or None
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self.tally = Tally(total=len(file.results) + len(file.open_assignments))
        for facts in file.results.values():
            self.tally.add(facts)

    async def run(self) -> Tally:
        """Make every open rollout.

        Raises:
            ServiceUnreachable: The service went away; what was finished is in the file.
        """
        remaining = iter(self._file.open_assignments)
        workers = min(self._concurrency, len(self._file.open_assignments))
        with ProgressView(self._console, self.tally) as view:
            try:
                async with asyncio.TaskGroup() as group:
                    watcher = group.create_task(self._watch(view))
                    async with asyncio.TaskGroup() as makers:
                        for _ in range(workers):
                            makers.create_task(self._make(remaining))
                    watcher.cancel()
            except* ProrlGymError as several:
                raise _first(several) from None
            finally:
                with contextlib.suppress(ProrlGymError, TimeoutError):
                    async with asyncio.timeout(_CANCEL_S):
                        if self.tally.finished + sum(self.tally.refused.values()) < self.tally.total:
                            await self._client.cancel(prefix=f"{self._client.run_id}-")
        return self.tally

    async def _make(self, remaining: Iterator[Assignment]) -> None:
        for assignment in remaining:
            try:
                result = await self._client.process(
                    assignment.instance,
                    task=self._task,
                    sampling_params=self._sampling,
                    timeout_s=self._timeout_s,
                    include=INCLUDED,
                    return_ledger=True,
                    cancel_job=False,
                    group_id=f"{self._client.run_id}-row-{assignment.row}",
                )
            except (RequestError, ServiceError) as e:
                self.tally.refuse(str(e))
                continue
            self._file.add(assignment, result)
            self.tally.add(self._file.results[assignment.key])

    async def _watch(self, view: ProgressView) -> None:
        told: set[str] = set()
        while True:
            self._check_service()
            status = await self._client.status()
            for server in status.llm_servers:
                if server.detail and server.address not in told:
                    told.add(server.address)
                    self._console.print(f"backend {server.address}: {server.detail}", soft_wrap=True, highlight=False)
            view.show(status)
            await asyncio.sleep(_LOOK_EVERY_S)


def run_interruptibly(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, where SIGTERM too cancels `main` and comes out as a KeyboardInterrupt."""

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - inside a coroutine that runs
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await main

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _first(group: BaseExceptionGroup[ProrlGymError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
