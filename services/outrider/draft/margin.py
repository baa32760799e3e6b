"""How long before the end of a verify step tokens have to be finished, learned from those that were late."""

__all__ = ["TableMargin"]

_IN_TIME = 0.985
_LATE = 1.03  # every third block may lack its last token: one that comes late costs only itself
_LOST = 1.2  # but of the tables themselves only about one in fifteen may come too late
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

    def learn(self, *, lost: bool, late: bool) -> None:
        """Whether the target went on without a block that its table held (`lost`), or without its last tokens."""
        self._seconds *= _LOST if lost else _LATE if late else _IN_TIME
        self._seconds = min(max(self._seconds, _SMALLEST_S), _LARGEST_S)
