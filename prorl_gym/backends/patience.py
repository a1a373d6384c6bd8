"""How long one model call puts up with failing engines: one clock from the first failure, and a growing back-off."""

import asyncio

from prorl_gym.errors import BackendError

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0


class Patience:
    """The clock starts at the first failure and is set back by progress.

    Args:
        limit_s: From the first failure to giving up.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until: float | None = None
        self._delay_s = _FIRST_DELAY_S

    def left_s(self) -> float:
        """Seconds until giving up; asking starts the clock."""
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + self._limit_s
        return self._until - now

    def progress(self) -> None:
        """Something went well: start over."""
        self._until = None
        self._delay_s = _FIRST_DELAY_S

    def check(self, error: BackendError) -> None:
        """Raise `error` when the patience is over."""
        if self.left_s() <= 0:
            raise error

    async def back_off(self, error: BackendError) -> None:
        """Wait before the next attempt, longer each time.

        Raises:
            BackendError: `error`, when the patience is over.
        """
        self.check(error)
        await asyncio.sleep(min(self._delay_s, max(0.0, self.left_s())))
        self._delay_s = min(_MAX_DELAY_S, 2 * self._delay_s)
