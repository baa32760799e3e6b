"""A text that shares the front of another: many branches of a long text cost no copy each."""

from collections.abc import Iterable, Sequence
from typing import overload

__all__ = ["ForkedText"]


class ForkedText(Sequence[int]):
    """The first tokens of another text, and tokens of its own behind them.

    The other text may grow or be cut behind the shared part; while this one is read, not within it.
    """

    __slots__ = ("_base", "_own", "_shared")

    def __init__(self, base: Sequence[int], shared: int, own: Iterable[int]) -> None:
        """`shared`: how many tokens of `base` come first."""
        self._base = base
        self._shared = shared
        self._own = list(own)

    def __len__(self) -> int:
        return self._shared + len(self._own)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self._base[places] if places < self._shared else self._own[places - self._shared]
        if places.step == 1 and places.start >= self._shared:  # the tail, which is what is mostly asked for
            return self._own[places.start - self._shared :][: len(places)]
        return [*self._base[: self._shared], *self._own][index]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens of its own."""
        self._own.extend(token_ids)
