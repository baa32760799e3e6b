"""Features of a sequence that have arrived and that the engine has not been given yet."""

__all__ = ["FeatureRows"]


class FeatureRows:
    """A buffer in front of the engine's pool: rows come in order, from position 0 on.

    `row_bytes` is the size of a row as the engine expects it; anything else is refused, as is a gap:
    what the target meant by it is then sent again from the start, or never needed.
    """

    def __init__(self, row_bytes: int, *, max_rows: int) -> None:
        self._row_bytes = row_bytes
        self._max_rows = max_rows
        self._known = 0
        self._waiting: list[tuple[int, bytes]] = []

    @property
    def known(self) -> int:
        """Rows that have arrived: all positions below it."""
        return self._known

    def add(self, first_position: int, num_rows: int, payload: bytes) -> bool:
        """Take rows that follow what is known, or repeat some of it; False when they do not."""
        end = first_position + num_rows
        if len(payload) != num_rows * self._row_bytes or first_position > self._known or end > self._max_rows:
            return False
        if end > self._known:
            skip = (self._known - first_position) * self._row_bytes
            self._waiting.append((self._known, payload[skip:]))
            self._known = end
        return True

    def take(self, first: int, end: int) -> list[tuple[int, bytes]]:
        """Remove and return rows of positions first … end - 1 that wait, as (position, packed rows).

        Rows before `first` are dropped: nothing will be computed from them any more.
        """
        taken: list[tuple[int, bytes]] = []
        kept: list[tuple[int, bytes]] = []
        for position, payload in self._waiting:
            low, high = max(first, position), min(end, position + len(payload) // self._row_bytes)
            if low < high:
                taken.append((low, self._cut(position, payload, low, high)))
            after = max(end, position)
            if after < position + len(payload) // self._row_bytes:
                kept.append((after, payload[(after - position) * self._row_bytes :]))
        self._waiting = kept
        return taken

    def forget(self) -> None:
        """Know nothing any more: the target starts again from position 0."""
        self._known = 0
        self._waiting = []

    def _cut(self, position: int, payload: bytes, low: int, high: int) -> bytes:
        return payload[(low - position) * self._row_bytes : (high - position) * self._row_bytes]
