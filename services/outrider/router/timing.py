"""Time as the router needs it: read it, be called later, wait. One seam, so that tests turn the clock."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from outrider.core.ports import Clock

__all__ = ["Alarm", "LoopTime", "TimeSource", "sleep"]


class Alarm(Protocol):
    """A pending call."""

    def cancel(self) -> None:
        """Take it back. Does nothing once the call was made."""
        ...


class TimeSource(Clock, Protocol):
    """A clock that can also ring."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Alarm:
        """Call `callback` on the event loop after `delay_s` seconds."""
        ...


class LoopTime:
    """The time of the running event loop."""

    def now(self) -> float:
        """Seconds of the loop's monotonic clock."""
        return asyncio.get_running_loop().time()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Alarm:
        """Call `callback` on the running loop."""
        return asyncio.get_running_loop().call_later(delay_s, callback)


async def sleep(time: TimeSource, delay_s: float) -> None:
    """Wait `delay_s` seconds of `time`."""
    rang = asyncio.Event()
    alarm = time.call_later(delay_s, rang.set)
    try:
        await rang.wait()
    finally:
        alarm.cancel()
