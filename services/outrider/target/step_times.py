"""Measured step times, and the speed-up over plain decoding that follows from them."""

from outrider.core.ports import Clock

__all__ = ["StepTimer", "StepTimes", "VerifyTimes"]

_SMOOTHING = 0.1
_FORGETTING = 0.98  # per step: about the last 50 count


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
    """Seconds of forward and verification by the number of rows: a line, fitted to recent steps."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_rows: int, seconds: float) -> None:
        """Count one step that only decoded."""
        self._n = self._n * _FORGETTING + 1.0
        self._x = self._x * _FORGETTING + num_rows
        self._y = self._y * _FORGETTING + seconds
        self._xx = self._xx * _FORGETTING + num_rows * num_rows
        self._xy = self._xy * _FORGETTING + num_rows * seconds

    def predict(self, num_rows: int) -> float:
        """Expected seconds of a step with so many rows; 0 before the first observation."""
        if self._n == 0.0:
            return 0.0
        spread = self._n * self._xx - self._x * self._x
        # A slope from rows that hardly vary, or a falling one, says nothing.
        slope = (self._n * self._xy - self._x * self._y) / spread if spread > 1e-9 * self._xx * self._n else 0.0
        slope = max(0.0, slope)
        return max(0.0, (self._y - slope * self._x) / self._n + slope * num_rows)


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
    def total_s(self) -> float:
        """Seconds from the start to the end of the last phase."""
        return self._last - self._started
