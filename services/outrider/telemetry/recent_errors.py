"""The last few things that went wrong, for `outrider status`."""

from collections import deque

from outrider.core.fleet import PastError
from outrider.core.ports import Clock

__all__ = ["RecentErrors"]


class RecentErrors:
    """Keeps the latest texts, in bounded space. Not thread-safe."""

    def __init__(self, clock: Clock, *, limit: int = 5) -> None:
        self._clock = clock
        self._kept: deque[tuple[float, str]] = deque(maxlen=limit)

    def add(self, text: str) -> None:
        """Something went wrong now."""
        self._kept.append((self._clock.now(), text))

    def latest_first(self) -> tuple[PastError, ...]:
        """What is kept, with its age now."""
        now = self._clock.now()
        return tuple(PastError(text=text, age_s=now - at_s) for at_s, text in reversed(self._kept))
