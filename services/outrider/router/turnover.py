"""How long a refused request has to wait for a place, by how fast places have become free lately."""

import math
from collections import deque

__all__ = ["Turnover"]

_WINDOW = 64
"""Recent completions that the rate is taken from."""


class Turnover:
    """Completions and refusals at one limit.

    Those that were refused since the last completion will all be back, and find places in turns, one
    request of each key after the other. So the wait of a key grows with its own refusals and with the
    number of keys that wait, never with how often another key asks.

    Worked example, one completion a second: a key refused for the third time while nobody else waits is
    told 3 s; one refused for the first time beside it 2 s, however often the other has asked.

    Time in which nobody wanted a place is no time that one took: `resumed` leaves it out.
    """

    def __init__(self) -> None:
        self._completions: deque[float] = deque(maxlen=_WINDOW)
        self._refused: dict[str, int] = {}

    def completed(self, now_s: float) -> None:
        """A place became free."""
        self._completions.append(now_s)
        self._refused.clear()

    def resumed(self, now_s: float) -> None:
        """A place is taken where all were free: since the last completion nothing could complete."""
        if self._completions:
            idle_s = now_s - self._completions[-1]
            self._completions = deque((at_s + idle_s for at_s in self._completions), maxlen=_WINDOW)

    def refused(self, key_id: str, now_s: float) -> float:
        """Count a refusal; returns the seconds to wait, infinite while nothing has completed."""
        mine = self._refused[key_id] = self._refused.get(key_id, 0) + 1
        if not self._completions:
            return math.inf
        per_completion_s = (now_s - self._completions[0]) / len(self._completions)
        return mine * len(self._refused) * per_completion_s
