"""Measured step times, and the speed-up over plain decoding that follows from them."""

from outrider.core.ports import Clock

__all__ = ["StepTimer", "StepTimes"]

_SMOOTHING = 0.1


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


class StepTimer:
    """Adds the seconds of each phase of one step to running sums."""

    def __init__(self, clock: Clock, sums: dict[str, float]) -> None:
        self._clock = clock
        self._sums = sums
        self._started = self._last = clock.now()

    def ends(self, phase: str) -> None:
        """The phase that began at the end of the one before is over."""
        now = self._clock.now()
        self._sums[phase] = self._sums.get(phase, 0.0) + now - self._last
        self._last = now

    @property
    def total_s(self) -> float:
        """Seconds from the start to the end of the last phase."""
        return self._last - self._started
