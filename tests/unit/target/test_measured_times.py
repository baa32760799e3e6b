"""Measured times: a step or an answer that something has held up once says little about those to come."""

import pytest

from outrider.core.link import LaunchRow, OutcomeEntry
from outrider.core.policy import RoundPlan
from outrider.core.proposal import Proposal
from outrider.core.speculation import ProposalSource, SpeculationMode, SpeculationReason
from outrider.target.link_times import LinkTimes
from outrider.target.outcome_book import OutcomeBook
from outrider.target.step_times import VerifyTimes

AHEAD = RoundPlan(mode=SpeculationMode.CACHED, num_draft_tokens=3, reason=SpeculationReason.ON, branch_budget=2)


def test_one_held_up_step_hardly_moves_the_estimate_and_slower_steps_do() -> None:
    times = VerifyTimes()
    for _ in range(5):
        times.observe(8, 0.0135)
    times.observe(8, 0.5)
    assert times.predict(8) < 1.11 * 0.0135
    for _ in range(80):
        times.observe(8, 0.05)
    assert times.predict(8) == pytest.approx(0.05, rel=0.05)


def test_a_first_step_of_no_time_is_no_bound_for_those_that_follow() -> None:
    times = VerifyTimes()
    times.observe(8, 0.0)
    times.observe(8, 0.0135)
    assert times.predict(8) == pytest.approx(0.0135)


def test_one_held_up_answer_hardly_moves_the_hop_and_a_slower_network_does() -> None:
    times = LinkTimes()
    times.start(step_ms=1.0)
    for _ in range(5):
        times.answered(0.003, 2)
    assert times.times.hop_s == pytest.approx(0.0005)
    times.answered(0.4, 2)
    assert times.times.hop_s < 0.001
    for _ in range(80):
        times.answered(0.012, 2)
    assert times.times.hop_s == pytest.approx(0.005, rel=0.05)


def entry(block_id: int, *token_ids: int) -> OutcomeEntry:
    block = Proposal(base_len=11, block_id=block_id, token_ids=token_ids, source=ProposalSource.DRAFT)
    return OutcomeEntry(num_accepted=0, next_token_id=5, proposal=block)


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (entry(7, 1, 2, 3), (1, 2, 3)),  # the same block has grown
        (entry(7, 1), (1, 2)),  # what came out of order is no loss
        (entry(8, 4, 5, 6), (1, 2)),  # of two blocks the first is the better one
    ],
)
def test_a_block_that_has_grown_takes_the_place_of_the_shorter_one(
    later: OutcomeEntry, expected: tuple[int, ...]
) -> None:
    book = OutcomeBook()
    book.launch(LaunchRow(handle=1, base_len=10, block_id=0, num_used=0, source=None, token_ids=(), ahead=AHEAD))
    book.add([entry(7, 1, 2)])
    book.add([later])
    book.settle(10, 0, 5)
    block = book.take()
    assert block is not None
    assert block.token_ids == expected
