"""Blocks that the draft has pushed for outcomes of the step in flight, and the look-up after it.

A hit costs no round trip: the block of what really happened is already here. Nothing else of a table is
ever looked at: it costs no more to keep than to drop.
"""

from collections.abc import Callable

from outrider.core.link import LaunchRow, OutcomeTable
from outrider.core.proposal import Proposal

__all__ = ["MAX_BOOK_SIZE", "OutcomeBook"]

MAX_BOOK_SIZE = 1 << 15
"""Outcomes and tokens of one step's tables together. The most that a draft has to send are 64 outcomes in 16
versions of up to 16 tokens: a third of it."""


class OutcomeBook:
    """Outcome tables of one sequence, for one step at a time."""

    def __init__(self) -> None:
        self._launched: LaunchRow | None = None
        self._tables: list[OutcomeTable] = []
        self._size = 0
        self._outcome: tuple[int, int] | None = None
        self._num_searched = 0
        self._found: Proposal | None = None
        self.lookup_pending = False
        """True from a verdict until `take` was asked for its block and the result was counted."""

    def launch(self, row: LaunchRow) -> None:
        """A new step is in flight; tables of earlier ones are of no use any more."""
        self._launched = row
        self._tables.clear()
        self._size = 0
        self._outcome = self._found = None
        self._num_searched = 0
        self.lookup_pending = False

    def matches(self, base_len: int, parent_block_id: int) -> bool:
        """Whether a table is for the step that was launched last."""
        row = self._launched
        return row is not None and (row.base_len, row.block_id) == (base_len, parent_block_id)

    def launched(self, base_len: int, block_id: int) -> bool:
        """Whether this block of the draft is what was launched at this length."""
        row = self._launched
        return block_id != 0 and row is not None and (row.base_len, row.block_id) == (base_len, block_id)

    def add(self, table: OutcomeTable) -> bool:
        """Keep a matching table; False when there are more than a draft has to send, and it is dropped."""
        size = 1 + len(table) + len(table.token_ids)  # one that is empty takes its place, too
        if self._size + size > MAX_BOOK_SIZE:
            return False
        self._tables.append(table)
        self._size += size
        return True

    def settle(self, base_len: int, num_accepted: int, next_token_id: int) -> None:
        """The step is over, with this outcome."""
        row = self._launched
        if row is not None and row.base_len == base_len:
            self._outcome = (num_accepted, next_token_id)
            self.lookup_pending = True

    def take(self, is_sound: Callable[[Proposal], bool]) -> Proposal | None:
        """The block for the outcome, if it has come, or has grown, since it was last asked for.

        `is_sound` decides whether a block that is found may be judged; one that may not is as good as none. Of
        two tables with the outcome the first has the better block; the same block with more tokens takes the
        place of the shorter one.
        """
        if self._outcome is None:
            return None
        before = self._found
        for table in self._tables[self._num_searched :]:
            block, known = table.find(*self._outcome), self._found
            if block is None:
                continue
            better = known is None or (known.block_id == block.block_id and len(block) > len(known))
            if better and is_sound(block):
                self._found = block
        self._num_searched = len(self._tables)
        return self._found if self._found is not before else None
