"""Where the events of one request wait for its client. Bounded: a slow client costs only itself."""

import asyncio

from outrider.core.dispatch import SequenceDelta, SequenceEnd
from outrider.core.errors import OutriderError

__all__ = ["ChoiceEvent", "RequestInbox"]

ChoiceEvent = tuple[int, SequenceDelta | SequenceEnd]
"""Choice index, and what its sequence emitted."""


class RequestInbox:
    """Events of all choices of a request, in order of arrival. Used on one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: list[ChoiceEvent] = []
        self._failure: OutriderError | None = None
        self._ready = asyncio.Event()

    @property
    def failed(self) -> bool:
        """True after `fail`: nothing more is taken in."""
        return self._failure is not None

    def put(self, event: ChoiceEvent) -> bool:
        """Add an event; False when the reader is too far behind or the request has failed.

        An end always finds room: there is one per choice, and it makes no more follow.
        """
        full = len(self._events) >= self._limit and not isinstance(event[1], SequenceEnd)
        if self._failure is not None or full:
            return False
        self._events.append(event)
        self._ready.set()
        return True

    def fail(self, error: OutriderError) -> None:
        """End the request with an error, behind what has already arrived. The first error stays."""
        if self._failure is None:
            self._failure = error
            self._ready.set()

    def wake(self) -> None:
        """Let `take` return, even with nothing: its caller has something else to look at."""
        self._ready.set()

    async def take(self) -> list[ChoiceEvent]:
        """Wait for events, or to be woken, and take all of them.

        Raises the error of the request once everything before it is taken.
        """
        await self._ready.wait()
        if not self._events and self._failure is not None:
            raise self._failure
        events, self._events = self._events, []
        if self._failure is None:
            self._ready.clear()
        return events
