"""Blocks that a target may name: found by id in whatever they were sent in, as far as they continue the text."""

import pytest

from outrider.core.link import OutcomeEntry, OutcomeTable
from outrider.core.proposal import Proposal, SparseLaw
from outrider.core.speculation import ProposalSource
from outrider.draft.sent_blocks import SentBlocks

TEXT_LEN = 10


def block(block_id: int, base_len: int, *token_ids: int) -> Proposal:
    return Proposal(base_len=base_len, block_id=block_id, token_ids=token_ids, source=ProposalSource.DRAFT)


def table(*blocks: Proposal) -> OutcomeTable:
    """Sent while nothing but the text was in flight."""
    entries = [
        OutcomeEntry(num_accepted=one.base_len - TEXT_LEN - 1, next_token_id=one.block_id, proposal=one)
        for one in blocks
    ]
    return OutcomeTable.of(1, TEXT_LEN, 0, entries)


def law(token_id: int) -> SparseLaw:
    return SparseLaw(token_ids=(token_id,), probs=(1.0,))


def test_a_block_is_found_while_it_continues_the_text() -> None:
    sent = SentBlocks(TEXT_LEN)
    alone = block(1, TEXT_LEN, 5, 6)
    near, far = block(2, TEXT_LEN + 1, 7), block(3, TEXT_LEN + 3, 8, 9)
    sent.add(alone)
    sent.add_table(table(near, far))
    found = [[sent.find(block_id) for block_id in (1, 2, 3, 4)]]
    for length in range(TEXT_LEN + 1, TEXT_LEN + 7):
        sent.text_is(length)
        found.append([sent.find(block_id) for block_id in (1, 2, 3, 4)])
    assert found == [
        [alone, None, None, None],
        [alone, near, None, None],  # it is judged by its tail
        [None, None, None, None],
        [None, None, far, None],
        [None, None, far, None],
        [None, None, None, None],
        [None, None, None, None],
    ]
    assert not sent._tables
    assert not sent._blocks


def test_a_text_that_is_written_anew_below_a_table_has_no_use_for_it() -> None:
    sent = SentBlocks(TEXT_LEN)
    sent.add_table(table(block(2, TEXT_LEN + 1, 7)))
    sent.text_is(TEXT_LEN)
    sent.text_is(TEXT_LEN + 1)
    assert sent.find(2) is None


def test_a_table_sent_again_with_longer_blocks_says_how_they_are() -> None:
    sent = SentBlocks(TEXT_LEN)
    ended, short, long = block(1, TEXT_LEN + 1, 5), block(2, TEXT_LEN + 1, 6), block(2, TEXT_LEN + 1, 6, 7)
    sent.add_table(table(ended, short))
    sent.add_table(table(long))
    sent.text_is(TEXT_LEN + 1)
    assert (sent.find(1), sent.find(2)) == (ended, long)


@pytest.mark.parametrize("named", [1, 2, 3, 9])
def test_laws_of_the_named_block_are_given_once_and_all_others_forgotten(named: int) -> None:
    sent = SentBlocks(TEXT_LEN)
    first, second, beyond = block(1, TEXT_LEN + 1, 5), block(2, TEXT_LEN + 1, 6, 7), block(3, TEXT_LEN + 4, 8)
    going_on = [law(6), law(7), law(8)]  # drafted further since
    sent.add_table(table(first, second, beyond), [[law(5)], going_on, [law(8)]])
    sent.text_is(TEXT_LEN + 1)
    expected = {1: (law(5),), 2: (law(6), law(7))}.get(named, ())
    assert sent.take_laws(named) == expected
    assert [sent.take_laws(block_id) for block_id in (1, 2, 3)] == [(), (), ()]
    assert sent.find(2) == second, "the block itself stays"


def test_laws_of_a_block_that_has_grown_are_those_of_all_its_tokens() -> None:
    sent = SentBlocks(TEXT_LEN)
    laws = [law(6)]
    sent.add_table(table(block(2, TEXT_LEN + 1, 6)), [laws])
    laws.append(law(7))
    sent.add_table(table(block(2, TEXT_LEN + 1, 6, 7)), [laws])
    sent.text_is(TEXT_LEN + 1)
    assert sent.take_laws(2) == (law(6), law(7))


def test_a_target_that_launches_one_text_for_ever_is_not_kept_for_ever() -> None:
    sent = SentBlocks(TEXT_LEN)
    for block_id in range(1, 1001):
        sent.add_table(table(block(block_id, TEXT_LEN + 1, 7)))
    assert len(sent._tables) == 256
    sent.text_is(TEXT_LEN + 1)
    assert sent.find(1) is None
    assert sent.find(1000) == block(1000, TEXT_LEN + 1, 7)
