"""A proposal: draft tokens offered as the continuation of a committed text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.core.speculation import ProposalSource

__all__ = ["BlockLaws", "Proposal", "SparseLaw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLaw:
    """The law q that really drew one draft token, as (token id, probability) pairs.

    Probabilities are renormalised over the transmitted ids, so q is exact (they sum to 1).
    """

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Draft tokens for positions base_len, base_len + 1, … of one sequence.

    `base_len` is the committed length (prompt included) that the block continues. Under the
    rejection rule `laws` holds q for each token, unless these follow as `BlockLaws` or nothing was
    drawn (n-grams); under the coupled rule it is empty.
    """

    base_len: int
    block_id: int
    token_ids: tuple[int, ...]
    source: ProposalSource
    laws: tuple[SparseLaw, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def usable_tail(self, committed: Sequence[int]) -> "Proposal | None":
        """The part of this block that still continues `committed`, or None if there is none.

        A block whose base lies behind is still good for its tail, provided that its head equals
        what was committed meanwhile (design: late is not always lost).
        """
        overlap = len(committed) - self.base_len
        if overlap < 0 or overlap >= len(self.token_ids):
            return None
        if overlap == 0:
            return self
        if list(self.token_ids[:overlap]) != list(committed[self.base_len :]):
            return None
        return replace(
            self,
            base_len=len(committed),
            token_ids=self.token_ids[overlap:],
            laws=self.laws[overlap:],
        )

    def trimmed(self, length: int) -> "Proposal":
        """The first `length` tokens of this block."""
        if length >= len(self.token_ids):
            return self
        return replace(self, token_ids=self.token_ids[:length], laws=self.laws[:length])


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLaws:
    """The laws of a block that came in an outcome table without them, sent once it is in flight."""

    handle: int
    base_len: int
    block_id: int
    laws: tuple[SparseLaw, ...]
    """q of each token that is verified, in order."""
