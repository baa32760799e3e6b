"""The measured time of a draft step."""

__all__ = ["StepTimer"]

_WEIGHT = 0.1
_FORGETTING = 0.001
_MOST = 2.0
"""Times the mean: a slower step counts as this slow."""


class StepTimer:
    """Exponentially weighted means of draft steps (forward and draw), in milliseconds; 0 before the first."""

    def __init__(self) -> None:
        self._recent_ms = 0.0
        self._by_size: dict[int, float] = {}

    @property
    def recent_ms(self) -> float:
        """Of the latest steps, whatever their batch was."""
        return self._recent_ms

    @property
    def single_ms(self) -> float:
        """Of the latest steps at batch 1."""
        return self._by_size.get(1, 0.0)

    def expected_ms(self, num_branches: int) -> float:
        """Of a step with so many branches: of the same power of two; else between the next smaller and the
        next larger one seen, or like the next smaller one where no larger was: it is worth a try.
        """
        size = num_branches.bit_length()
        if size in self._by_size:
            return self._by_size[size]
        below = max((one for one in self._by_size if one < size), default=None)
        above = min((one for one in self._by_size if one > size), default=None)
        if below is None or above is None:
            return 0.0 if below is None else self._by_size[below]
        share = (num_branches - (1 << below - 1)) / ((1 << above - 1) - (1 << below - 1))
        return self._by_size[below] + share * (self._by_size[above] - self._by_size[below])

    def record(self, seconds: float, *, num_branches: int) -> None:
        """Count one step."""
        milliseconds, size = 1000.0 * seconds, num_branches.bit_length()
        self._recent_ms = _blend(self._recent_ms, milliseconds)
        self._by_size[size] = _blend(self._by_size.get(size, 0.0), milliseconds)
        for larger in [one for one in self._by_size if one > size]:
            # One that was slow once may not be any more: it comes within reach again, slowly.
            self._by_size[larger] -= _FORGETTING * (self._by_size[larger] - self._by_size[size])


def _blend(mean: float, value: float) -> float:
    # A step that something has held up says nothing about those to come, and after it the target may ask
    # for none from which to learn better.
    return value if mean == 0.0 else mean + _WEIGHT * (min(value, _MOST * mean) - mean)
