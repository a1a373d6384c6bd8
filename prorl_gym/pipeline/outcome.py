"""How a job ended: the JobResult before it becomes JSON."""

from collections.abc import Collection
from typing import Any

from prorl_gym.types import JobStatus, ResultPart


class Outcome:
    """One job's end, immutable. Any thread may export it."""

    status: JobStatus

    def result(self, include: Collection[ResultPart] | None = None) -> dict[str, Any]:
        """The result in the shape of `types.JobResult`, safe for any JSON encoder.

        Args:
            include: Which heavy parts to send; None sends all but the ledger, which is sent too when it was asked for.
        """
        raise NotImplementedError
