"""Tables of the step in flight: which block an outcome gets, what is looked at, and how much is kept."""

from dataclasses import replace

import pytest

from outrider.core.link import LaunchRow, OutcomeEntry, OutcomeTable
from outrider.core.policy import RoundPlan
from outrider.core.proposal import Proposal
from outrider.core.speculation import ProposalSource, SpeculationMode, SpeculationReason
from outrider.target.outcome_book import MAX_BOOK_SIZE, OutcomeBook

AHEAD = RoundPlan(mode=SpeculationMode.CACHED, num_draft_tokens=3, reason=SpeculationReason.ON, branch_budget=2)
BASE = 10
Outcome = tuple[int, int]
HAPPENED = (1, 5)


def entry(outcome: Outcome, block_id: int, *token_ids: int) -> OutcomeEntry:
    accepted, token_id = outcome
    block = Proposal(base_len=BASE + accepted + 1, block_id=block_id, token_ids=token_ids, source=ProposalSource.DRAFT)
    return OutcomeEntry(num_accepted=accepted, next_token_id=token_id, proposal=block)


def table(*entries: OutcomeEntry) -> OutcomeTable:
    return OutcomeTable.of(1, BASE, 0, entries)


class Book(OutcomeBook):
    """A book that notes what it looks at; token 99 is unsound."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_at: list[tuple[int, ...]] = []
        self.launch(LaunchRow(handle=1, base_len=BASE, block_id=0, num_used=0, source=None, ahead=AHEAD))

    def happened(self) -> tuple[int, ...] | None:
        """The ids of the block of what happened, so far as it is new."""
        self.settle(BASE, *HAPPENED)
        block = self.take(self._is_sound)
        return None if block is None else block.token_ids

    def _is_sound(self, block: Proposal) -> bool:
        self.looked_at.append(block.token_ids)
        return 99 not in block.token_ids


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (entry(HAPPENED, 7, 1, 2, 3), (1, 2, 3)),  # the same block has grown
        (entry(HAPPENED, 7, 1), (1, 2)),  # what came out of order is no loss
        (entry(HAPPENED, 8, 4, 5, 6), (1, 2)),  # of two blocks the first is the better one
        (entry(HAPPENED, 7, 1, 2, 99), (1, 2)),  # it has grown by what cannot be
        (entry((0, 5), 8, 4, 5, 6), (1, 2)),
        (entry((1, 6), 8, 4, 5, 6), (1, 2)),
    ],
)
@pytest.mark.parametrize("asked_between", [False, True])
def test_of_two_tables_the_better_block_is_taken(
    later: OutcomeEntry, expected: tuple[int, ...], asked_between: bool
) -> None:
    book = Book()
    book.add(table(entry((0, 5), 3, 8, 8), entry(HAPPENED, 7, 1, 2)))
    if asked_between:
        assert book.happened() == (1, 2)
    book.add(table(later))
    assert book.happened() == (None if asked_between and expected == (1, 2) else expected)
    assert book.happened() is None, "once is enough"


def test_of_two_blocks_in_one_table_the_first_is_the_better_one() -> None:
    book = Book()
    book.add(table(entry(HAPPENED, 7, 1), entry(HAPPENED, 8, 4, 5, 6)))
    assert book.happened() == (1,)


def test_nothing_is_looked_at_but_the_block_of_what_happened_and_that_once() -> None:
    book = Book()
    garbage = [entry((accepted, token), 20 + token, 99, 99) for accepted in range(3) for token in range(5)]
    book.add(table(*garbage, entry(HAPPENED, 7, 99), entry((1, 6), 8, 4)))
    assert book.happened() is None
    assert book.happened() is None
    assert book.looked_at == [(99,)]


def test_garbage_does_not_stand_in_the_way_of_what_comes_later() -> None:
    book = Book()
    book.add(table(entry(HAPPENED, 7, 99, 99)))
    book.add(table(entry(HAPPENED, 8, 4)))
    assert book.happened() == (4,)


def test_tables_of_an_earlier_step_are_gone() -> None:
    book = Book()
    book.add(table(entry(HAPPENED, 7, 1, 2)))
    assert book.happened() == (1, 2)
    book.launch(LaunchRow(handle=1, base_len=BASE, block_id=0, num_used=0, source=None, ahead=AHEAD))
    assert book.happened() is None
    book.add(table(entry(HAPPENED, 7, 1)))
    assert book.happened() == (1,), "the shorter one of another step"


def test_no_more_is_kept_of_a_step_than_a_draft_has_to_send() -> None:
    outcomes = [entry((accepted, token), 1 + token, *range(16)) for accepted in range(16) for token in range(4)]
    full = table(*outcomes)
    book = Book()
    assert all(book.add(full) for _ in range(16)), "64 outcomes in 16 versions"
    while book.add(full):
        pass
    kept = len(book._tables)
    assert kept * (1 + 64 + 64 * 16) <= MAX_BOOK_SIZE < (kept + 1) * (1 + 64 + 64 * 16)
    assert not book.add(full)
    assert not book.add(replace(full, token_ids=(1,) * MAX_BOOK_SIZE))
    book.launch(LaunchRow(handle=1, base_len=BASE, block_id=0, num_used=0, source=None, ahead=AHEAD))
    assert book.add(full), "of the next step"


def test_empty_tables_are_not_kept_without_end() -> None:
    book = Book()
    for _ in range(MAX_BOOK_SIZE):
        assert book.add(table())
    assert not book.add(table())
