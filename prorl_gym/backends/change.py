"""A wake-up call for everybody who waits at that moment."""

import asyncio


class Signal:
    """What waiters look at may have changed: they look again. Nothing is remembered for those who come later."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all current waiters."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        await self._event.wait()
