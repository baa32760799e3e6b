"""Prompt lookup: propose what followed the last occurrence of the text's own suffix.

Needs no draft model: text that repeats itself (code, quotes, summaries) is its own draft.
(Saxena 2023, "Prompt Lookup Decoding".)
"""

from collections.abc import Iterable

__all__ = ["NgramIndex"]


class NgramIndex:
    """Every n-gram of one sequence's committed text, min_n ≤ n ≤ max_n, with where it last ended.

    Grows with the text: each token costs max_n - min_n + 1 dictionary writes, and nothing is ever
    rescanned. Only committed tokens go in, so there is nothing to roll back.
    """

    def __init__(self, *, min_n: int, max_n: int) -> None:
        """Raises ValueError unless 1 ≤ min_n ≤ max_n."""
        if not 1 <= min_n <= max_n:
            raise ValueError(f"n-gram lengths {min_n} … {max_n}")
        self._min_n = min_n
        self._max_n = max_n
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        """n-gram → index of the token behind its latest occurrence that has a token behind it."""

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append committed tokens."""
        tokens = self._tokens
        for token_id in token_ids:
            end = len(tokens)
            for n in range(self._min_n, min(self._max_n, end) + 1):
                self._next[tuple(tokens[end - n : end])] = end
            tokens.append(token_id)

    def propose(self, k: int) -> tuple[int, ...]:
        """Up to k tokens that continue the text; empty when no suffix of it occurred before.

        The longest matching suffix counts, at its most recent earlier occurrence. Where the match
        overlaps the end of the text, the copy goes on through itself, so a loop is continued.
        """
        length = self.match_len
        return self._copy(self._next[tuple(self._tokens[-length:])], k) if length else ()

    @property
    def match_len(self) -> int:
        """Length of the longest suffix, within the bounds, that occurred before; 0 without one."""
        tokens = self._tokens
        for n in range(min(self._max_n, len(tokens)), self._min_n - 1, -1):
            if tuple(tokens[-n:]) in self._next:
                return n
        return 0

    def _copy(self, start: int, k: int) -> tuple[int, ...]:
        """k tokens from index `start` on; those behind the end are the proposed ones themselves."""
        tokens, proposed = self._tokens, list[int]()
        for index in range(start, start + k):
            proposed.append(tokens[index] if index < len(tokens) else proposed[index - len(tokens)])
        return tuple(proposed)
