"""Blocks of one sequence that went to the target, which names one of them by its id in a launch or a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.link import OutcomeTable
from outrider.core.proposal import Proposal, SparseLaw

__all__ = ["SentBlocks"]

_MAX_TABLES = 256
"""Of one text, a table being sent again for every token that it grows by: more than a target in its senses asks for."""


@dataclass(slots=True)
class _SentTable:
    table: OutcomeTable
    late_laws: Sequence[Sequence[SparseLaw]]
    """By row, what the table was sent without; empty when that is nothing."""


class SentBlocks:
    """Finds them by id, as far as they continue the text. Of a table at most one is ever named, so it is kept as
    it was sent.
    """

    def __init__(self, text_len: int) -> None:
        """`text_len`: tokens of the text now."""
        self._text_len = text_len
        self._blocks: dict[int, Proposal] = {}
        self._tables: list[_SentTable] = []
        """Oldest first."""

    def add(self, block: Proposal) -> None:
        """A block was sent by itself."""
        self._blocks[block.block_id] = block

    def add_table(self, table: OutcomeTable, late_laws: Sequence[Sequence[SparseLaw]] = ()) -> None:
        """A table was sent, or sent again with longer blocks. `late_laws`: by row, the laws that did not go along."""
        self._tables.append(_SentTable(table, late_laws))
        del self._tables[:-_MAX_TABLES]

    def find(self, block_id: int) -> Proposal | None:
        """The block of this id, as it was sent last."""
        block = self._blocks.get(block_id)
        if block is None and (sent := self._table_of(block_id)) is not None:
            block = sent.table.block(block_id)
        return block if block is not None and self._continues_text(block) else None

    def take_laws(self, block_id: int) -> tuple[SparseLaw, ...]:
        """The laws that a block of a table was sent without. All others that are kept are forgotten."""
        laws: tuple[SparseLaw, ...] = ()
        sent, block = self._table_of(block_id), self.find(block_id)
        if sent is not None and sent.late_laws and block is not None:
            laws = tuple(sent.late_laws[sent.table.block_ids.index(block_id)][: len(block)])
        for one in self._tables:
            one.late_laws = ()
        return laws

    def text_is(self, length: int) -> None:
        """The text has this length now: forget the blocks that it has passed by."""
        self._text_len = length
        self._blocks = {key: block for key, block in self._blocks.items() if self._continues_text(block)}
        self._tables = [one for one in self._tables if self._may_continue_text(one.table)]

    def _table_of(self, block_id: int) -> _SentTable | None:
        return next((one for one in reversed(self._tables) if block_id in one.table.block_ids), None)

    def _continues_text(self, block: Proposal) -> bool:
        return block.base_len <= self._text_len < block.base_len + len(block)

    def _may_continue_text(self, table: OutcomeTable) -> bool:
        """Whether some of its blocks may. Looks at none by itself."""
        most = max(table.num_accepted, default=0) + 1 + max(table.block_lens, default=0)
        return table.base_len < self._text_len < table.base_len + most
