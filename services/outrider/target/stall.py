"""Notices an engine thread that hangs in a step: a process that answers is not yet one that works."""

from outrider.core.errors import EngineUnavailable
from outrider.core.ports import Clock

__all__ = ["StallWatch"]


class StallWatch:
    """Compares a counter that grows with every turn of the engine thread with the one seen before."""

    def __init__(self, *, limit_s: float, clock: Clock) -> None:
        """`limit_s`: longest time that one turn may take, its longest collective included."""
        self._limit_s = limit_s
        self._clock = clock
        self._beat: int | None = None
        self._since = 0.0

    def check(self, beat: int) -> None:
        """Take note of the counter. Raises `EngineUnavailable` when it has stood still for too long."""
        now = self._clock.now()
        if beat != self._beat:
            self._beat, self._since = beat, now
        elif now - self._since > self._limit_s:
            raise EngineUnavailable(f"the engine has been in one step for {now - self._since:.1f} s")
