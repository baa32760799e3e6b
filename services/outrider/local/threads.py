"""Blocking work off the event loop that may also happen while the interpreter exits.

`asyncio.to_thread` cannot be used then: executors refuse work before exit handlers run.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["run_in_thread"]

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own; returns and raises what it does. It goes on if the caller is cancelled."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - crosses to whoever waits
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, value, None)

    threading.Thread(target=run, name="outrider-local-stop", daemon=True).start()
    return await result
