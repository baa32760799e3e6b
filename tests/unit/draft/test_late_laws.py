"""Rejection rule: a table goes without laws, and a Launch brings those of the block that it names."""

import pytest
from tests.unit.draft.bench import GREEDY, Bench, Peer

from outrider.core.link import (
    Capability,
    CloseSequence,
    DraftProposal,
    Launch,
    LaunchRow,
    OutcomeEntry,
    OutcomeTable,
    VerdictRow,
)
from outrider.core.policy import RoundPlan
from outrider.core.prefix_hash import PrefixHash
from outrider.core.proposal import BlockLaws, Proposal, SparseLaw
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import ProposalSource, SpeculationMode, SpeculationReason, VerificationRule
from outrider.rpc.link_conversion import LinkIdentity, LinkWriter

PROMPT = [5, 7, 11, 2, 9, 30, 41]
SAMPLED = SamplingParams()
LATE = frozenset({Capability.SEQUENTIAL, Capability.CACHED, Capability.SPARSE_LAWS, Capability.LATE_LAWS})
EARLY = LATE - {Capability.LATE_LAWS}
AHEAD = RoundPlan(mode=SpeculationMode.CACHED, num_draft_tokens=4, reason=SpeculationReason.ON, branch_budget=5)


def opened(
    capabilities: frozenset[Capability] = LATE,
    *,
    sampling: SamplingParams = SAMPLED,
    rule: VerificationRule = VerificationRule.REJECTION,
) -> Peer:
    peer = Bench(q_top_k=6).peer(capabilities=capabilities)
    peer.open(1, PROMPT, sampling=sampling, rule=rule)
    return peer


def launch(peer: Peer, block: Proposal | None = None, *, num_used: int | None = None, handle: int = 1) -> None:
    """A step starts that has this block of the draft's in flight, or nothing."""
    used = 0 if block is None else len(block) if num_used is None else num_used
    row = LaunchRow(
        handle=handle,
        base_len=len(peer.texts[handle]),
        block_id=0 if block is None else block.block_id,
        num_used=used,
        source=None if block is None else ProposalSource.DRAFT,
        ahead=AHEAD,
    )
    peer.say(Launch(step=1, rows=(row,), budget_us=0))


def table(peer: Peer) -> tuple[OutcomeEntry, ...]:
    peer.bench.settle()
    (only,) = peer.take(OutcomeTable)
    return only.entries()


def come_true(peer: Peer, entry: OutcomeEntry, in_flight: Proposal | None = None) -> None:
    """The step has this outcome."""
    text, base_len = peer.texts[1], len(peer.texts[1])
    text += in_flight.token_ids[: entry.num_accepted] if in_flight is not None else ()
    text.append(entry.next_token_id)
    cached = RoundPlan(mode=SpeculationMode.CACHED, num_draft_tokens=4, reason=SpeculationReason.ON)
    peer.judge(
        VerdictRow(
            handle=1,
            base_len=base_len,
            block_id=0 if in_flight is None else in_flight.block_id,
            num_accepted=entry.num_accepted,
            next_token_id=entry.next_token_id,
            prefix_hash=PrefixHash(text).value,
            plan=cached,
        )
    )


def pushed(peer: Peer) -> list[BlockLaws]:
    """The laws that leave without any computing."""
    before = len(peer.bench.engine.batches)
    peer.bench.deliver(peer.bench.drafter.flush())
    assert len(peer.bench.engine.batches) == before
    return peer.take(BlockLaws)


def laws_in_tables(rank: int) -> tuple[OutcomeEntry, tuple[SparseLaw, ...]]:
    """What a target without late laws gets: the entry of the first table at this rank, with its laws."""
    peer = opened(EARLY)
    launch(peer)
    entry = table(peer)[rank]
    return entry, entry.proposal.laws


@pytest.mark.parametrize("rank", range(5))
def test_launch_brings_the_laws_of_its_block_and_of_no_other(rank: int) -> None:
    peer = opened()
    launch(peer)
    entries = table(peer)
    assert len(entries) == 5
    assert not any(one.proposal.laws for one in entries)
    assert pushed(peer) == []
    block = entries[rank].proposal
    come_true(peer, entries[rank])
    assert pushed(peer) == []
    launch(peer, block)
    early, laws = laws_in_tables(rank)
    assert early.proposal.token_ids == block.token_ids
    assert len(laws) == 4
    expected = BlockLaws(handle=1, base_len=block.base_len, block_id=block.block_id, laws=laws)
    assert pushed(peer) == [expected]
    assert peer.bench.drafter.counters.late_laws == 1
    launch(peer, block)
    assert pushed(peer) == [], "once is enough"


def test_they_lead_the_message_and_need_no_step_of_the_draft() -> None:
    peer = opened()
    launch(peer)
    entry = table(peer)[0]
    come_true(peer, entry)
    launch(peer, entry.proposal)
    (outbound,) = peer.bench.drafter.flush()
    assert [type(one) for one in outbound[1]] == [BlockLaws]


def test_a_block_that_is_used_in_part_has_the_laws_of_that_part() -> None:
    peer = opened()
    launch(peer)
    entry = table(peer)[0]
    come_true(peer, entry)
    launch(peer, entry.proposal, num_used=2)
    _, laws = laws_in_tables(0)
    assert [one.laws for one in pushed(peer)] == [laws[:2]]


def test_round_after_round() -> None:
    """Blocks of one table after the other are launched; each gets its own laws, whatever was accepted."""
    peer = opened()
    launch(peer)
    block: Proposal | None = None
    for round_number in range(6):
        entries = table(peer)
        entry = entries[round_number % len(entries)]
        come_true(peer, entry, block)
        block = entry.proposal
        launch(peer, block)
        (laws,) = pushed(peer)
        assert (laws.base_len, laws.block_id, len(laws.laws)) == (len(peer.texts[1]), block.block_id, len(block))
        for token_id, law in zip(block.token_ids, laws.laws, strict=True):
            assert token_id in law.token_ids
            assert len(law.token_ids) <= 6
            assert sum(law.probs) == pytest.approx(1.0, abs=1e-6)
    assert peer.bench.drafter.counters.resyncs == 0


@pytest.mark.parametrize(
    ("sampling", "rule"),
    [(GREEDY, VerificationRule.REJECTION), (SAMPLED, VerificationRule.COUPLED), (GREEDY, VerificationRule.COUPLED)],
)
def test_no_laws_where_nothing_is_judged_by_them(sampling: SamplingParams, rule: VerificationRule) -> None:
    peer = opened(sampling=sampling, rule=rule)
    launch(peer)
    entry = table(peer)[0]
    assert entry.proposal.laws == ()
    come_true(peer, entry)
    launch(peer, entry.proposal)
    assert pushed(peer) == []


def test_a_block_that_was_waited_for_brings_its_laws_along_and_they_are_not_sent_again() -> None:
    peer = opened()
    peer.judge(peer.row(1, 3, k=3))
    peer.bench.settle()
    (event,) = peer.take(DraftProposal)
    assert len(event.proposal.laws) == 3
    launch(peer, event.proposal)
    assert pushed(peer) == []


def test_a_launch_that_cannot_be_followed_brings_none() -> None:
    peer = opened()
    launch(peer)
    entry = table(peer)[0]
    come_true(peer, entry)
    peer.texts[1].append(3)  # a token of which the draft was not told
    launch(peer, entry.proposal)
    assert pushed(peer) == []
    peer.texts[1].pop()
    unknown = Proposal(base_len=len(peer.texts[1]), block_id=999, token_ids=(1,), source=ProposalSource.DRAFT)
    launch(peer, unknown)
    assert pushed(peer) == []
    peer.say(CloseSequence(handle=1))
    dropped = peer.bench.drafter.counters.dropped_events
    launch(peer, entry.proposal)
    assert pushed(peer) == []
    assert peer.bench.drafter.counters.dropped_events == dropped + 1


def test_a_table_is_no_larger_under_the_rejection_rule() -> None:
    """On the wire. With its laws it would be many times as large."""
    writer = LinkWriter(LinkIdentity(link_id=1, engine_epoch=1, draft_incarnation=1))

    def size(capabilities: frozenset[Capability], rule: VerificationRule) -> int:
        peer = opened(capabilities, rule=rule)
        launch(peer)
        peer.bench.settle()
        tables = peer.take(OutcomeTable)
        assert [len(one.entries()) for one in tables] == [5]
        assert all(len(entry.proposal) == 4 for entry in tables[0].entries())
        # Ids below 128 take a byte each, whichever they are.
        return sum(message.ByteSize() for message in writer.responses(tables))

    coupled = size(LATE, VerificationRule.COUPLED)
    assert size(LATE, VerificationRule.REJECTION) == coupled
    assert size(EARLY, VerificationRule.REJECTION) > 5 * coupled
