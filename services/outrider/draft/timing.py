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
        self._measured: dict[int, float] = {}
        """By size: the power of two that the number of branches lies in."""
        self._hoped: dict[int, float] = {}
        """The same, and less the longer ago it was measured: one that was slow once comes within reach again."""

    @property
    def recent_ms(self) -> float:
        """Of the latest steps, whatever their batch was."""
        return self._recent_ms

    @property
    def single_ms(self) -> float:
        """Of the latest steps at batch 1."""
        return self._measured.get(1, 0.0)

    def expected_ms(self, num_branches: int) -> float:
        """Of a step with so many branches: of the same power of two; else between the next smaller and the
        next larger one seen, or like the next smaller one where no larger was: it is worth a try.
        """
        size, hoped = num_branches.bit_length(), self._hoped
        if size in hoped:
            return hoped[size]
        below = max((one for one in hoped if one < size), default=None)
        above = min((one for one in hoped if one > size), default=None)
        if below is None or above is None:
            return 0.0 if below is None else hoped[below]
        share = (num_branches - (1 << below - 1)) / ((1 << above - 1) - (1 << below - 1))
        return hoped[below] + share * (hoped[above] - hoped[below])

    @property
    def most_to_try(self) -> int | None:
        """Most branches of the next step: of one power of two more than was ever seen, so that what a step may
        cost is found out in small steps. None before the first.
        """
        return (2 << max(self._hoped)) - 1 if self._hoped else None

    def record(self, seconds: float, *, num_branches: int) -> None:
        """Count one step."""
        milliseconds, size = 1000.0 * seconds, num_branches.bit_length()
        self._recent_ms = _blend(self._recent_ms, milliseconds)
        known = self._measured.get(size, 0.0)
        # The less is left of what was measured long ago, the more this counts.
        faded = 1.0 - self._hoped[size] / known if known else 0.0
        mean = _blend(known, milliseconds, max(_WEIGHT, faded))
        self._measured[size] = self._hoped[size] = mean
        for other, hoped in self._hoped.items():
            if other > size:
                self._hoped[other] -= _FORGETTING * (hoped - mean)
            elif hoped > mean:  # no step takes longer than one with more branches
                self._measured[other] = self._hoped[other] = mean


def _blend(mean: float, value: float, weight: float = _WEIGHT) -> float:
    # A step that something has held up says nothing about those to come, and after it the target may ask
    # for none from which to learn better.
    return value if mean == 0.0 else mean + weight * (min(value, _MOST * mean) - mean)
