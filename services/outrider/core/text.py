"""Text side of a sequence: the detokenizer port, and finding stop strings while text streams."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Detokenizer", "DetokenizerFactory", "ScannedText", "StopStringFinder"]


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text, incrementally."""

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """Return what is left at the end (an incomplete character, rendered as U+FFFD)."""
        ...


class DetokenizerFactory(Protocol):
    """Makes a detokenizer for one sequence."""

    def __call__(self, *, context: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        """`context` = tokens before the output, whose text is not returned."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedText:
    """Text that is safe to show, and the index of the stop string that ended it, if one did."""

    text: str
    stop_string_index: int | None = None


class StopStringFinder:
    """Finds the first stop string in a growing text and holds back what could become one.

    The earliest occurrence wins; at the same place the string that stands first in the list.
    """

    def __init__(self, strings: Sequence[str], *, include: bool) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._held = ""

    def feed(self, text: str) -> ScannedText:
        """Add text; return what is now certain to lie before any stop string."""
        self._held += text
        found = [(at, index) for index, one in enumerate(self._strings) if (at := self._held.find(one)) >= 0]
        if found:
            at, index = min(found)
            end = at + len(self._strings[index]) if self._include else at
            shown, self._held = self._held[:end], ""
            return ScannedText(text=shown, stop_string_index=index)
        keep = self._possible_start()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return ScannedText(text=shown)

    def flush(self) -> str:
        """Return the held-back text when the sequence ended without a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Length of the longest suffix of the held text that begins some stop string."""
        longest = 0
        for one in self._strings:
            for length in range(min(len(one) - 1, len(self._held)), longest, -1):
                if self._held.endswith(one[:length]):
                    longest = length
                    break
        return longest
