"""Blocks that the draft has pushed for outcomes of the step in flight, and the look-up after it.

A hit costs no round trip: the block of what really happened is already here.
"""

from collections.abc import Iterable

from outrider.core.link import LaunchRow, OutcomeEntry
from outrider.core.proposal import Proposal

__all__ = ["OutcomeBook"]


class OutcomeBook:
    """Outcome table of one sequence, for one step at a time."""

    def __init__(self) -> None:
        self._launched: LaunchRow | None = None
        self._blocks: dict[tuple[int, int], Proposal] = {}
        self._outcome: tuple[int, int] | None = None
        self.lookup_pending = False
        """True from a verdict until `take` was asked for its block and the result was counted."""

    def launch(self, row: LaunchRow) -> None:
        """A new step is in flight; tables of earlier ones are of no use any more."""
        self._launched = row
        self._blocks.clear()
        self._outcome = None
        self.lookup_pending = False

    def matches(self, base_len: int, parent_block_id: int) -> bool:
        """Whether a table is for the step that was launched last."""
        row = self._launched
        return row is not None and (row.base_len, row.block_id) == (base_len, parent_block_id)

    def launched(self, base_len: int, block_id: int) -> bool:
        """Whether this block of the draft is what was launched at this length."""
        row = self._launched
        return block_id != 0 and row is not None and (row.base_len, row.block_id) == (base_len, block_id)

    def add(self, entries: Iterable[OutcomeEntry]) -> None:
        """Add blocks of a matching table; of two for one outcome the first is the better one.

        The same block again with more tokens takes the place of the shorter one.
        """
        for entry in entries:
            outcome, block = (entry.num_accepted, entry.next_token_id), entry.proposal
            known = self._blocks.setdefault(outcome, block)
            if known.block_id == block.block_id and len(block) > len(known):
                self._blocks[outcome] = block

    def settle(self, base_len: int, num_accepted: int, next_token_id: int) -> None:
        """The step is over, with this outcome."""
        row = self._launched
        if row is not None and row.base_len == base_len:
            self._outcome = (num_accepted, next_token_id)
            self.lookup_pending = True

    def take(self) -> Proposal | None:
        """The block for the outcome, if it has arrived."""
        if self._outcome is None:
            return None
        return self._blocks.pop(self._outcome, None)
