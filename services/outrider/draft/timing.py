"""The measured time of a draft step."""

__all__ = ["StepTimer"]

_WEIGHT = 0.1
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
        """Of a step with so many branches: of the same power of two, else of the next smaller one seen."""
        size = num_branches.bit_length()
        return next((self._by_size[one] for one in range(size, 0, -1) if one in self._by_size), 0.0)

    def record(self, seconds: float, *, num_branches: int) -> None:
        """Count one step."""
        milliseconds, size = 1000.0 * seconds, num_branches.bit_length()
        self._recent_ms = _blend(self._recent_ms, milliseconds)
        self._by_size[size] = _blend(self._by_size.get(size, 0.0), milliseconds)


def _blend(mean: float, value: float) -> float:
    # A step that something has held up says nothing about those to come, and after it the target may ask
    # for none from which to learn better.
    return value if mean == 0.0 else mean + _WEIGHT * (min(value, _MOST * mean) - mean)
