"""Blocking work that nothing waits for at the end: a download that hangs keeps neither loop nor process alive."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, but in a daemon thread of its own; cancelling leaves the thread to its work."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: list[T], error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value[0])
        else:
            future.set_exception(error)

    def work() -> None:
        value: list[T] = []
        error: BaseException | None = None
        try:
            value.append(context.run(function, *args, **kwargs))
        except StopIteration as raised:  # no future can hold it
            error = RuntimeError(f"StopIteration: {raised}")
        except BaseException as raised:  # noqa: BLE001 - carried to whoever asked
            error = raised
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=work, name="prorl-background", daemon=True).start()
    return await future
