"""Measured step times, and the speed-up over plain decoding that follows from them."""

import math
from bisect import bisect_left

from outrider.core.ports import Clock

__all__ = ["StepTimer", "StepTimes", "VerifyTimes"]

_SMOOTHING = 0.1
_MOST = 2.0
"""Times the mean: a slower step counts as this slow."""
_BUCKETS_PER_DOUBLING = 2


class StepTimes:
    """Exponential means of decode-step times by batch size (powers of two), plain and speculative."""

    def __init__(self) -> None:
        self._means: dict[tuple[int, bool], float] = {}

    def observe(self, *, batch_size: int, speculative: bool, seconds: float) -> None:
        """Count one step that only decoded."""
        key = (batch_size.bit_length(), speculative)
        old = self._means.get(key)
        self._means[key] = seconds if old is None else old + _SMOOTHING * (seconds - old)

    def speedup(self, *, batch_size: int, tokens_per_round: float) -> float | None:
        """Tokens per second with speculation over without, at this batch size.

        tokens_per_round / (speculative step / plain step). None until both kinds of step were seen
        at this size.
        """
        plain = self._means.get((batch_size.bit_length(), False))
        speculative = self._means.get((batch_size.bit_length(), True))
        if plain is None or not speculative:
            return None
        return tokens_per_round * plain / speculative


class VerifyTimes:
    """Seconds of forward and verification by the number of rows: means per bucket, joined by lines."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}  # bucket → (mean rows, mean seconds)
        self._curve: list[tuple[float, float]] = []

    def observe(self, num_rows: int, seconds: float) -> None:
        """Count one step that only decoded."""
        bucket = round(_BUCKETS_PER_DOUBLING * math.log2(num_rows))
        rows, mean = self._points.get(bucket, (float(num_rows), 0.0))
        # A step that something has held up must not make its size seem too dear to be tried again. A mean
        # of 0, as one tick of a coarse clock leaves it, bounds nothing.
        mean = mean or seconds
        counted_s = min(seconds, _MOST * mean)
        self._points[bucket] = (rows + _SMOOTHING * (num_rows - rows), mean + _SMOOTHING * (counted_s - mean))
        self._curve = sorted(self._points.values())

    def predict(self, num_rows: float) -> float:
        """Expected seconds of a step with so many rows; 0 before the first observation.

        Outside of what was seen: flat below, and above by the last slope.
        """
        curve = self._curve
        if not curve:
            return 0.0
        place = bisect_left(curve, (num_rows,))
        if place == 0:
            return curve[0][1]
        if len(curve) == 1:
            return curve[0][1]
        (x0, y0), (x1, y1) = curve[place - 1 : place + 1] if place < len(curve) else curve[-2:]
        return max(min(y0, y1), y0 + (y1 - y0) * (num_rows - x0) / max(x1 - x0, 1e-9))


class StepTimer:
    """Times the phases of one step, and adds them to running sums."""

    def __init__(self, clock: Clock, sums: dict[str, float]) -> None:
        self._clock = clock
        self._sums = sums
        self._seconds: dict[str, float] = {}
        self._started = self._last = clock.now()

    def ends(self, phase: str) -> None:
        """The phase that began at the end of the one before is over."""
        now = self._clock.now()
        took = now - self._last
        self._seconds[phase] = self._seconds.get(phase, 0.0) + took
        self._sums[phase] = self._sums.get(phase, 0.0) + took
        self._last = now

    def seconds(self, phase: str) -> float:
        """Of one phase in this step."""
        return self._seconds.get(phase, 0.0)

    @property
    def by_phase(self) -> dict[str, float]:
        """Seconds of every phase of this step."""
        return dict(self._seconds)

    @property
    def total_s(self) -> float:
        """Seconds from the start to the end of the last phase."""
        return self._last - self._started
