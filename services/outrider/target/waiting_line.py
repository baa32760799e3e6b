"""Who is admitted next: seats are shared between API keys, and priority orders the requests of each."""

from collections import Counter
from collections.abc import Iterable, Iterator

from outrider.target.running import RunningSequence

__all__ = ["WaitingLine"]

_OPEN_SHARE = 0.75
"""Up to here everybody may wait; the rest is for keys that have fewer waiting than an equal share."""


class WaitingLine:
    """Sequences that wait for admission, one line for each API key. Callers without a key share one.

    The key with the fewest running sequences is next; of equal ones the one whose last turn is
    longest ago. So no key starves another, however many requests it sends and whatever priority it
    gives them; a key alone has all seats. Whoever is first blocks all others until there is room:
    once its key has nothing running, nobody goes before it twice.
    """

    def __init__(self) -> None:
        self._lines: dict[str, list[RunningSequence]] = {}
        self._count = 0
        self._turns: dict[str, int] = {}
        """When each key was last admitted, counted since somebody began to wait."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[RunningSequence]:
        for line in self._lines.values():
            yield from line

    def add(self, one: RunningSequence) -> None:
        """Put a sequence in the line of its key: higher priority first, then order of arrival."""
        line = self._lines.setdefault(_key(one), [])
        line.append(one)
        line.sort(key=_place)
        self._count += 1

    def remove(self, one: RunningSequence) -> None:
        """Take a sequence out."""
        key = _key(one)
        self._lines[key].remove(one)
        self._count -= 1
        if not self._lines[key]:
            del self._lines[key]
        if not self._lines:
            self._turns.clear()

    def admit(self, one: RunningSequence) -> None:
        """Take out a sequence that runs now: its key has had its turn."""
        self._turns[_key(one)] = max(self._turns.values(), default=0) + 1
        self.remove(one)

    def first(self, running: Iterable[RunningSequence]) -> RunningSequence:
        """The sequence that is next, given those that run. The line is not empty."""
        if len(self._lines) == 1:
            return next(iter(self))
        seats = Counter(_key(one) for one in running)
        return min(
            (line[0] for line in self._lines.values()),
            key=lambda one: (seats[_key(one)], self._turns.get(_key(one), 0), *_place(one)),
        )

    def has_room(self, key_id: str, places: int) -> bool:
        """Whether one more sequence of a key may wait, where `places` may wait altogether."""
        if self._count >= places:
            return False
        mine = len(self._lines.get(key_id, ()))
        share = max(places // len(self._lines.keys() | {key_id}), 1)
        return self._count < _OPEN_SHARE * places or mine < share


def _key(one: RunningSequence) -> str:
    return one.sequence.request.key_id


def _place(one: RunningSequence) -> tuple[int, int]:
    return (-one.sequence.request.priority, one.handle)
