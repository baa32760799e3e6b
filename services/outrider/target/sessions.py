"""Routers connected to one engine: their outboxes on the event loop, filled by the engine thread."""

import threading
from collections.abc import Callable, Sequence
from itertools import count

from outrider.core.dispatch import EngineEvent, EngineHello, RouterCommand
from outrider.core.errors import EngineUnavailable
from outrider.core.mailbox import AsyncMailbox

__all__ = ["LocalSession", "SessionBoard"]

_EVENTS_LIMIT = 65536  # per router; one that stops reading is cut off, not waited for


class SessionBoard:
    """Outbox of each session. `emit` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = count(1)
        self._outboxes: dict[int, AsyncMailbox[EngineEvent]] = {}
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why every session has ended; None while the engine runs."""
        return self._failure

    def open(self) -> tuple[int, AsyncMailbox[EngineEvent]]:
        """Add a session. Raises `EngineUnavailable` after a failure."""
        outbox: AsyncMailbox[EngineEvent] = AsyncMailbox(_EVENTS_LIMIT)
        with self._lock:
            if self._failure is not None:
                raise EngineUnavailable(self._failure)
            session_id = next(self._ids)
            self._outboxes[session_id] = outbox
        return session_id, outbox

    def emit(self, session_id: int, events: Sequence[EngineEvent]) -> None:
        """Hand events to a router; one whose outbox overflows is cut off."""
        with self._lock:
            outbox = self._outboxes.get(session_id)
        if outbox is not None and not outbox.put(events):
            outbox.close()

    def emit_to_all(self, events: Sequence[EngineEvent]) -> None:
        """Hand events to every router."""
        with self._lock:
            session_ids = list(self._outboxes)
        for session_id in session_ids:
            self.emit(session_id, events)

    def remove(self, session_id: int) -> None:
        """Forget a session."""
        with self._lock:
            outbox = self._outboxes.pop(session_id, None)
        if outbox is not None:
            outbox.close()

    def fail(self, cause: str) -> None:
        """End every session, now and in future, with this cause."""
        with self._lock:
            self._failure = cause
            outboxes = list(self._outboxes.values())
        for outbox in outboxes:
            outbox.close()


class LocalSession:
    """Implements `EngineSession` in the engine's own process."""

    def __init__(
        self,
        hello: EngineHello,
        board: SessionBoard,
        submit: Callable[[int, Sequence[RouterCommand]], None],
        leave: Callable[[int], None],
    ) -> None:
        self._hello = hello
        self._board = board
        self._submit = submit
        self._leave = leave
        self._id, self._outbox = board.open()
        self._closed = False

    @property
    def hello(self) -> EngineHello:
        """Who answers."""
        return self._hello

    def send(self, commands: Sequence[RouterCommand]) -> None:
        """Queue commands. Raises `EngineUnavailable` or `Overloaded`."""
        if self._board.failure is not None:
            raise EngineUnavailable(self._board.failure)
        self._submit(self._id, commands)

    async def receive(self) -> list[EngineEvent]:
        """Wait for events. Raises `EngineUnavailable` when the engine or this session has ended."""
        events = await self._outbox.take()
        if not events:
            raise EngineUnavailable(self._board.failure or "the session was closed")
        return events

    def close(self) -> None:
        """Leave; the engine aborts what is still running."""
        if not self._closed:
            self._closed = True
            self._board.remove(self._id)
            self._leave(self._id)
