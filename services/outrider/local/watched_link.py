"""A draft transport that lets the event loop wait until the engine has met its draft."""

import asyncio
from collections.abc import Sequence

from outrider.core.errors import EngineUnavailable
from outrider.core.link import LinkDown, LinkEvent, LinkUp, TargetEvent
from outrider.core.ports import DraftTransport

__all__ = ["WatchedLink"]


class WatchedLink:
    """Implements `DraftTransport` around another one. Made on the event loop."""

    def __init__(self, inner: DraftTransport) -> None:
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._up = asyncio.Event()
        self._problem = "no draft has answered yet"

    async def wait_up(self, timeout_s: float) -> None:
        """Return once the engine has taken note of the link. Raises `EngineUnavailable` with the cause."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError as error:
            raise EngineUnavailable(f"no link to the draft within {timeout_s:g} s: {self._problem}") from error

    def send(self, events: Sequence[TargetEvent]) -> bool:
        """As the inner one."""
        return self._inner.send(events)

    def receive(self, timeout_s: float) -> list[LinkEvent]:
        """As the inner one."""
        events = self._inner.receive(timeout_s)
        for event in events:
            if isinstance(event, LinkUp):
                self._loop.call_soon_threadsafe(self._up.set)
            elif isinstance(event, LinkDown):
                self._problem = event.cause
                self._loop.call_soon_threadsafe(self._up.clear)
        return events

    def close(self) -> None:
        """As the inner one."""
        self._inner.close()
