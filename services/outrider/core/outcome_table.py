"""Blocks for the likely outcomes of a verify step, as columns: many are made and sent, one at most is used."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from outrider.core.proposal import Proposal, SparseLaw
from outrider.core.speculation import ProposalSource

__all__ = ["OutcomeEntry", "OutcomeTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeEntry:
    """If `num_accepted` are accepted and `next_token_id` follows, `proposal` is the next block."""

    num_accepted: int
    next_token_id: int
    proposal: Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeTable:
    """Blocks for likely outcomes of the block in flight, best first; outcome i is row i of the columns.

    Whoever makes one sees to it that the columns agree: as many outcomes in each of the first four as in
    the others, sum(block_lens) token ids, and as many laws or none.
    """

    handle: int
    base_len: int
    """Committed length before the step."""
    parent_block_id: int
    """The block in flight; 0 for another's, or none."""
    num_accepted: tuple[int, ...] = ()
    """Accepted lengths j."""
    next_token_ids: tuple[int, ...] = ()
    """Next tokens t."""
    block_ids: tuple[int, ...] = ()
    block_lens: tuple[int, ...] = ()
    """Tokens of each block, which continues committed length base_len + j + 1."""
    token_ids: tuple[int, ...] = ()
    """All blocks, end to end."""
    laws: tuple[SparseLaw, ...] = ()
    """q of each of `token_ids`, where laws go along; see `Proposal`."""
    last: bool = True

    @classmethod
    def of(
        cls, handle: int, base_len: int, parent_block_id: int, entries: Sequence[OutcomeEntry], last: bool = True
    ) -> "OutcomeTable":
        """The table of these outcomes, best first.

        Raises `ValueError` for a block that does not continue its outcome, and where laws go along with some
        tokens only.
        """
        blocks = [entry.proposal for entry in entries]
        for entry in entries:
            if entry.proposal.base_len != base_len + entry.num_accepted + 1:
                raise ValueError(f"base_len: {entry.proposal.base_len} does not follow {entry.num_accepted} accepted")
        token_ids = tuple(chain.from_iterable(block.token_ids for block in blocks))
        laws = tuple(chain.from_iterable(block.laws for block in blocks))
        if laws and any(len(block.laws) != len(block) for block in blocks):
            raise ValueError(f"laws: {len(laws)} for {len(token_ids)} tokens")
        return cls(
            handle=handle,
            base_len=base_len,
            parent_block_id=parent_block_id,
            num_accepted=tuple(entry.num_accepted for entry in entries),
            next_token_ids=tuple(entry.next_token_id for entry in entries),
            block_ids=tuple(block.block_id for block in blocks),
            block_lens=tuple(map(len, blocks)),
            token_ids=token_ids,
            laws=laws,
            last=last,
        )

    def __len__(self) -> int:
        """How many outcomes."""
        return len(self.block_ids)

    def find(self, num_accepted: int, next_token_id: int) -> Proposal | None:
        """The block for an outcome; of two the first, which is the better one."""
        for row, token_id in enumerate(self.next_token_ids):
            if token_id == next_token_id and self.num_accepted[row] == num_accepted:
                return self._block(row)
        return None

    def block(self, block_id: int) -> Proposal | None:
        """The block of this id."""
        return self._block(self.block_ids.index(block_id)) if block_id in self.block_ids else None

    def entries(self) -> tuple[OutcomeEntry, ...]:
        """Each outcome by itself."""
        return tuple(
            OutcomeEntry(num_accepted=accepted, next_token_id=token_id, proposal=self._block(row))
            for row, (accepted, token_id) in enumerate(zip(self.num_accepted, self.next_token_ids, strict=True))
        )

    def _block(self, row: int) -> Proposal:
        start = sum(self.block_lens[:row])
        end = start + self.block_lens[row]
        return Proposal(
            base_len=self.base_len + self.num_accepted[row] + 1,
            block_id=self.block_ids[row],
            token_ids=self.token_ids[start:end],
            source=ProposalSource.DRAFT,
            laws=self.laws[start:end],
        )
