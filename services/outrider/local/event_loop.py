"""An event loop in a thread of its own, for callers that are not asynchronous."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

__all__ = ["Resident"]

T = TypeVar("T")
R = TypeVar("R")

_STOP_S = 60.0


class Resident(Generic[T]):
    """Holds an asynchronous context open on a background event loop until `close`."""

    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        """Enter the context. Raises what entering raises, also `KeyboardInterrupt`, with all undone."""
        self._context = context
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-local", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self.value: T = self.run(context.__aenter__())
        except BaseException:
            self._stop_loop()
            raise

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run on the loop and wait for the result; an interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Leave the context and end the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self.run(self._leave())
        finally:
            self._stop_loop()

    async def _leave(self) -> None:
        await self._context.__aexit__(None, None, None)

    def _stop_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(_finish_tasks(), self._loop).result(_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        self._loop.close()


async def _finish_tasks() -> None:
    """Let what was cancelled clean up."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.get_running_loop().shutdown_default_executor()
