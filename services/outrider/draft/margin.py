"""How long before the end of a verify step tokens have to be finished, learned from those that were late."""

__all__ = ["TableMargin"]

_STEP_UP = 1.03
_STEP_DOWN = 0.985  # so that every third block may lack its last token: one that comes late costs only itself
_SMALLEST_S = 0.0002
_LARGEST_S = 0.05


class TableMargin:
    """Grows with each late table, shrinks slowly with each that was in time."""

    def __init__(self, start_s: float) -> None:
        self._seconds = start_s

    @property
    def seconds(self) -> float:
        """Time to keep free."""
        return self._seconds

    def learn(self, *, late: bool) -> None:
        """Whether the target went on without a block that its table held, or without its last tokens."""
        self._seconds *= _STEP_UP if late else _STEP_DOWN
        self._seconds = min(max(self._seconds, _SMALLEST_S), _LARGEST_S)
