"""Bounded queues between the event loop and a worker thread. Nobody polls; nobody blocks the sender."""

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

__all__ = ["AsyncMailbox", "Mailbox"]

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Any thread puts; one worker thread takes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[T] = deque()
        self._ready = threading.Condition()
        self._closed = False

    def put(self, item: T) -> bool:
        """Add an item; False when the box is full or closed. Never blocks."""
        return self.put_all((item,))

    def put_all(self, items: Sequence[T]) -> bool:
        """Add all of these items or, when the box is closed or has no room for all, none. Never blocks."""
        with self._ready:
            if self._closed or len(self._items) + len(items) > self._limit:
                return False
            self._items.extend(items)
            self._ready.notify()
            return True

    def put_always(self, item: T) -> None:
        """Add an item whose number is bounded elsewhere (such as one per connection), full or not."""
        with self._ready:
            self._items.append(item)
            self._ready.notify()

    def take(self, timeout_s: float | None) -> list[T]:
        """Take everything, waiting at most `timeout_s` (None: without limit) for the first item.

        Empty after a time-out, or at once when the box is closed and drained.
        """
        if timeout_s == 0.0 and not self._items:
            return []  # a look that a step takes several times, and mostly in vain
        with self._ready:
            self._ready.wait_for(lambda: self._items or self._closed, timeout_s)
            items = list(self._items)
            self._items.clear()
            return items

    def close(self) -> None:
        """Refuse further items and wake the worker."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed


class AsyncMailbox(Generic[T]):
    """Any thread puts; one coroutine takes. Made on the event loop that takes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._items: deque[T] = deque()
        self._ready = asyncio.Event()
        self._closed = False

    def put(self, items: Sequence[T]) -> bool:
        """Add items in order; False (and none added) when the box would overflow or is closed."""
        with self._lock:
            if self._closed or len(self._items) + len(items) > self._limit:
                return False
            wake = not self._items
            self._items.extend(items)
        if wake:
            self._wake()
        return True

    async def take(self) -> list[T]:
        """Wait for at least one item and take everything; empty once the box is closed and drained."""
        while True:
            with self._lock:
                if self._items or self._closed:
                    items = list(self._items)
                    self._items.clear()
                    return items
                self._ready.clear()
            await self._ready.wait()

    def close(self) -> None:
        """Refuse further items and wake the taker."""
        with self._lock:
            self._closed = True
        self._wake()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the loop is gone, and the taker with it
            with self._lock:
                self._closed = True
