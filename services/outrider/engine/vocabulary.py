"""Which token each id stands for, and whether two models agree about it.

Draft and target exchange ids only: one id that means two things makes them talk past each other,
silently. Sizes are no test: models of one family pad their logits differently (151936 and 152064
columns over the same tokenizer). Special tokens and merges are compared as well: with other ones the
draft was trained on other ids for the same text, and would guess badly without ever being wrong.
"""

import hashlib
from dataclasses import dataclass

__all__ = ["Vocabulary", "what_fits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Token strings in id order, and how text is cut into them."""

    tokens: tuple[str | None, ...]
    """The token of each id; None where an id is not assigned."""
    special_ids: frozenset[int] = frozenset()
    """Ids of tokens that stand for no text, such as the end of a turn."""
    merges: tuple[str, ...] = ()
    """Pairs in the order in which they are merged; none where the tokenizer does not merge."""

    def fingerprint(self) -> bytes:
        """SHA-256 over the assigned ids and their tokens; unassigned ids (padding) do not count.

        It says whether ids can be exchanged at all, which is what a running link needs to know.
        """
        digest = hashlib.sha256()
        for token_id, token in enumerate(self.tokens):
            if token is not None:
                text = token.encode("utf-8", "surrogatepass")
                # With its length, so that no two lists run together into the same bytes.
                digest.update(f"{token_id}:{len(text)}:".encode())
                digest.update(text)
        return digest.digest()

    def first_difference(self, other: "Vocabulary") -> str | None:
        """Describe the first thing that the two do not share, or None if they agree.

        In this order: the lowest id whose token differs, the lowest id that is special on one side
        only, the first merge that differs.
        """
        for token_id in range(max(len(self.tokens), len(other.tokens))):
            mine, theirs = self._token(token_id), other._token(token_id)
            if mine != theirs:
                return f"token id {token_id} is {_show(mine)} here and {_show(theirs)} there"
        for token_id in sorted(self.special_ids ^ other.special_ids):
            here, there = ("special", "ordinary") if token_id in self.special_ids else ("ordinary", "special")
            return f"token id {token_id}, {_show(self._token(token_id))}, is {here} here and {there} there"
        for index in range(max(len(self.merges), len(other.merges))):
            pair, another = (one.merges[index] if index < len(one.merges) else None for one in (self, other))
            if pair != another:
                return f"merge {index} is {_show(pair)} here and {_show(another)} there"
        return None

    def _token(self, token_id: int) -> str | None:
        return self.tokens[token_id] if token_id < len(self.tokens) else None


def what_fits(target: str) -> str:
    """What to draft with instead of a model that numbers its tokens differently."""
    return (
        f"what fits: 'self' (the target in four bits), a smaller model of the same family as {target!r}, or a draft "
        f"made for it by `outrider distill --target {target}`"
    )


def _show(token: str | None) -> str:
    return "not assigned" if token is None else repr(token)
