"""Which token each id stands for, and whether two models agree about it.

Draft and target exchange ids only: one id that means two things makes them talk past each other,
silently. Sizes are no test: models of one family pad their logits differently (151936 and 152064
columns over the same tokenizer).
"""

import hashlib
from dataclasses import dataclass

__all__ = ["Vocabulary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Token strings in id order."""

    tokens: tuple[str | None, ...]
    """The token of each id; None where an id is not assigned."""

    def fingerprint(self) -> bytes:
        """SHA-256 over the assigned ids and their tokens; unassigned ids (padding) do not count."""
        digest = hashlib.sha256()
        for token_id, token in enumerate(self.tokens):
            if token is not None:
                text = token.encode("utf-8", "surrogatepass")
                # With its length, so that no two lists run together into the same bytes.
                digest.update(f"{token_id}:{len(text)}:".encode())
                digest.update(text)
        return digest.digest()

    def first_difference(self, other: "Vocabulary") -> str | None:
        """Describe the lowest id that the two do not share, or None if they agree."""
        for token_id in range(max(len(self.tokens), len(other.tokens))):
            mine, theirs = self._token(token_id), other._token(token_id)
            if mine != theirs:
                return f"token id {token_id} is {_show(mine)} here and {_show(theirs)} there"
        return None

    def _token(self, token_id: int) -> str | None:
        return self.tokens[token_id] if token_id < len(self.tokens) else None


def _show(token: str | None) -> str:
    return "not assigned" if token is None else repr(token)
