"""One job's stay in one stage."""

import asyncio
from collections.abc import Callable

from prorl_gym.errors import Stage
from prorl_gym.logs import log_context
from prorl_gym.pipeline.gate import Gate
from prorl_gym.pipeline.stage_times import StageTimes


class StageSlot:
    """`async with` queues for a slot of the stage, holds it while the block lasts, and keeps the times.

    Args:
        on_entry: Called as soon as the slot is there.
    """

    __slots__ = ("_gate", "_logs", "_on_entry", "_priority", "_stage", "_times")

    def __init__(
        self,
        stage: Stage,
        gate: Gate,
        times: StageTimes,
        *,
        job_id: str,
        priority: int,
        on_entry: Callable[[Stage], None],
    ) -> None:
        self._stage = stage
        self._gate = gate
        self._times = times
        self._priority = priority
        self._on_entry = on_entry
        self._logs = log_context(job_id=job_id, stage=stage)

    async def __aenter__(self) -> None:
        """Queue."""
        self._times.queue(self._stage)
        try:
            await self._gate.enter(self._priority)
        except asyncio.CancelledError:
            self._times.leave()
            raise
        self._times.enter(self._stage)
        self._logs.__enter__()
        self._on_entry(self._stage)

    async def __aexit__(self, *_: object) -> None:
        """Free the slot."""
        self._logs.__exit__(None, None, None)
        self._times.leave()
        self._gate.leave()
