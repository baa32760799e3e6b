"""The measured time of a draft step."""

__all__ = ["StepTimer"]

_WEIGHT = 0.1


class StepTimer:
    """Exponentially weighted means of draft steps (forward and draw), in milliseconds; 0 before the first."""

    def __init__(self) -> None:
        self._recent_ms = 0.0
        self._single_ms = 0.0

    @property
    def recent_ms(self) -> float:
        """Of the latest steps, whatever their batch was."""
        return self._recent_ms

    @property
    def single_ms(self) -> float:
        """Of the latest steps at batch 1."""
        return self._single_ms

    def record(self, seconds: float, *, num_branches: int) -> None:
        """Count one step."""
        milliseconds = 1000.0 * seconds
        self._recent_ms = _blend(self._recent_ms, milliseconds)
        if num_branches == 1:
            self._single_ms = _blend(self._single_ms, milliseconds)


def _blend(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean + _WEIGHT * (value - mean)
