"""Messages that take time to arrive."""

from collections import deque
from typing import Generic, TypeVar

from outrider.emulation.virtual_time import Actor, VirtualTime

__all__ = ["VirtualMailbox"]

T = TypeVar("T")


class VirtualMailbox(Generic[T]):
    """Any actor puts, one takes. Messages keep their order and arrive one hop after they were sent."""

    def __init__(self, time: VirtualTime, *, hop_s: float) -> None:
        self.time = time
        self._hop_s = hop_s
        self._items: deque[tuple[float, T]] = deque()
        self._taker: Actor | None = None
        """The actor that waits in `take`, if one does."""
        self._deadline = 0.0
        self.num_messages = 0

    def put(self, item: T) -> None:
        """Send a message now."""
        arrival = self.time.now() + self._hop_s
        self._items.append((arrival, item))
        self.num_messages += 1
        if self._taker is not None and len(self._items) == 1 and arrival < self._deadline:
            self.time.wake(self._taker, arrival)

    def take(self, timeout_s: float | None) -> list[T]:
        """Everything that has arrived, waiting at most `timeout_s` (None: without limit) for the first.

        Empty after a time-out.
        """
        if not self._arrived() and (timeout_s is None or timeout_s > 0):
            self._wait(float("inf") if timeout_s is None else self.time.now() + timeout_s)
        taken = []
        while self._arrived():
            taken.append(self._items.popleft()[1])
        return taken

    def _arrived(self) -> bool:
        return bool(self._items) and self._items[0][0] <= self.time.now()

    def _wait(self, deadline: float) -> None:
        moment = min(deadline, self._items[0][0]) if self._items else deadline
        self._taker, self._deadline = self.time.current, deadline
        try:
            self.time.wait_until(None if moment == float("inf") else moment)
        finally:
            self._taker = None
