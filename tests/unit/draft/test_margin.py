"""How much time is kept free before a step ends: what teaches it, and whom that concerns."""

from dataclasses import replace

import pytest
from tests.unit.draft.bench import Bench, Peer

from outrider.core.link import Capability, Launch, LaunchRow, OutcomeEntry, OutcomeTable, VerdictRow
from outrider.core.policy import RoundPlan
from outrider.core.prefix_hash import PrefixHash
from outrider.core.proposal import Proposal
from outrider.core.speculation import ProposalSource, SpeculationMode, SpeculationReason

PROMPT = [5, 7, 11, 2, 9, 30, 41]
CACHED = frozenset({Capability.SEQUENTIAL, Capability.CACHED})
AHEAD = RoundPlan(mode=SpeculationMode.CACHED, num_draft_tokens=4, reason=SpeculationReason.ON, branch_budget=4)
START_S = 0.003


def launch(
    peer: Peer,
    block: Proposal | None = None,
    *,
    num_used: int = 0,
    num_arrived: int = 0,
    wanted: int = 4,
    budget_us: int = 1_000_000,
) -> None:
    """A step starts for which the target has `num_arrived` tokens of this block (0: does not say), and runs
    `num_used`. It wants blocks of `wanted` tokens next.
    """
    row = LaunchRow(
        handle=1,
        base_len=len(peer.texts[1]),
        block_id=block.block_id if block is not None else 0,
        num_used=num_used,
        num_arrived=num_arrived,
        source=ProposalSource.DRAFT if num_used else None,
        ahead=replace(AHEAD, num_draft_tokens=wanted),
    )
    peer.say(Launch(step=1, rows=(row,), budget_us=budget_us))


def come_true(peer: Peer, num_accepted: int, next_token_id: int) -> None:
    """The step that had nothing in flight has this outcome."""
    text = peer.texts[1]
    base_len = len(text)
    text.append(next_token_id)
    peer.judge(
        VerdictRow(
            handle=1,
            base_len=base_len,
            block_id=0,
            num_accepted=num_accepted,
            next_token_id=next_token_id,
            prefix_hash=PrefixHash(text).value,
            plan=RoundPlan(mode=SpeculationMode.CACHED, num_draft_tokens=4, reason=SpeculationReason.ON),
        )
    )


def round_with_a_table(peer: Peer) -> OutcomeEntry:
    """A step whose outcome was drafted ahead; the entry of that outcome."""
    launch(peer)
    peer.bench.settle()
    entry = peer.take(OutcomeTable)[-1].entries()[0]
    come_true(peer, entry.num_accepted, entry.next_token_id)
    return entry


def margin_s(peer: Peer) -> float:
    return peer.bench.drafter._residents.links[peer.link_id].margin.seconds


@pytest.mark.parametrize(
    ("named", "num_arrived", "num_used", "wanted", "factor"),
    [
        (True, 4, 4, 4, 0.985),  # in time
        (True, 4, 2, 4, 0.985),  # as well, but there was no room to run all of it
        (True, 4, 0, 4, 0.985),
        (True, 3, 3, 4, 1.03),  # without its last token
        (True, 3, 1, 4, 1.03),
        (True, 3, 3, 3, 1.03),  # which was late, even though it would not have been run
        # A target that does not say what has come:
        (True, 0, 4, 4, 0.985),
        (True, 0, 3, 4, 1.03),
        (True, 0, 3, 3, 0.985),
        (True, 0, 0, 4, 1.0),  # here, but there was no room to run it
        (False, 0, 0, 4, 1.2),  # not here
    ],
)
def test_only_tables_that_were_late_keep_more_time_free(
    named: bool, num_arrived: int, num_used: int, wanted: int, factor: float
) -> None:
    peer = Bench(table_margin_s=START_S).peer(capabilities=CACHED)
    peer.open(1, PROMPT)
    block = round_with_a_table(peer).proposal
    launch(peer, block if named else None, num_used=num_used, num_arrived=num_arrived, wanted=wanted)
    assert margin_s(peer) == pytest.approx(factor * START_S)
    peer.bench.settle()
    assert peer.take(OutcomeTable), "the next table is drafted all the same"


def test_what_one_target_loses_shortens_no_other_targets_tables() -> None:
    bench = Bench(num_blocks=2000, table_margin_s=START_S)
    far, near = (bench.peer(link_id, capabilities=CACHED) for link_id in (1, 2))
    for peer in (far, near):
        peer.open(1, PROMPT)
    for _ in range(20):
        round_with_a_table(far)  # and the next launch names none of its blocks
    launch(far, budget_us=20_000)
    bench.settle()
    launch(near, budget_us=20_000)
    bench.settle()
    assert margin_s(far) > 10 * START_S
    assert margin_s(near) == START_S
    lengths = [
        max(len(one.proposal) for table in peer.take(OutcomeTable) for one in table.entries()) for peer in (far, near)
    ]
    assert lengths == [1, 4]


def test_a_table_that_the_verdict_comes_before_is_lost_and_that_is_learned_once() -> None:
    """The target says 40 ms and takes 5.5: with the time that is kept free at first, no table is ever sent."""
    bench = Bench(num_blocks=2000, table_margin_s=START_S)
    peer = bench.peer(capabilities=CACHED)
    peer.open(1, PROMPT)
    sequence = bench.drafter._residents.links[1].sequences[1]
    ends = 0.0

    def verdict() -> None:
        in_flight = sequence.in_flight
        if in_flight is not None and in_flight.branches and bench.clock.time >= ends:
            come_true(peer, *next(iter(in_flight.branches)))

    margins = []
    for _ in range(30):
        margins.append(margin_s(peer))
        launch(peer, budget_us=40_000)
        ends = bench.clock.time + 0.0055  # in the third draft step
        while bench.drafter.has_work:
            bench.step(verdict)
        if peer.take(OutcomeTable):
            break
    else:
        raise AssertionError("no table goes out in time")
    assert margins == pytest.approx([START_S * 1.2**count for count in range(len(margins))])
    assert len(margins) > 10
