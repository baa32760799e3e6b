"""What the target holds of a sequence on its draft: the block that a step takes, and what it says of one left out."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.support.local_engine import LocalEngine, request

from outrider.core.link import Launch, LaunchRow, OutcomeEntry, OutcomeTable
from outrider.core.policy import GateSettings, RoundPlan
from outrider.core.proposal import Proposal, SparseLaw
from outrider.core.sequence import Commit, Sequence
from outrider.core.speculation import (
    ProposalSource,
    SpeculationChoice,
    SpeculationMode,
    SpeculationPreference,
    SpeculationReason,
    VerificationRule,
)
from outrider.engine.base import ForwardSlice
from outrider.engine.scripted import ScriptedConfig
from outrider.target.config import TargetConfig
from outrider.target.draft_checks import BlockChecks
from outrider.target.held_sequence import HeldSequence
from outrider.target.proposers import ProposerCounters
from outrider.target.running import RunningSequence, StreamId
from outrider.target.scheduler import ScheduledRow

AHEAD = RoundPlan(mode=SpeculationMode.CACHED, num_draft_tokens=4, reason=SpeculationReason.ON, branch_budget=4)
TOKEN = 5
VOCABULARY = 32


def held_after_a_step() -> tuple[HeldSequence, Commit, ProposerCounters]:
    """A sequence that has committed one token; its step had nothing in flight."""
    sequence, counters = Sequence(request(range(1, 10)), handle=1), ProposerCounters()
    held = HeldSequence(sequence, BlockChecks(vocab_size=VOCABULARY, counters=counters))
    held.opening()
    assert held.acknowledge(sequence.committed_len)
    base_len = sequence.committed_len
    held.book.launch(LaunchRow(handle=1, base_len=base_len, block_id=0, num_used=0, source=None, ahead=AHEAD))
    sequence.token_ids.append(TOKEN)
    commit = Commit(
        base_len=base_len, first_token_index=0, token_ids=(TOKEN,), logprobs=(), num_accepted=0, finish=None
    )
    return held, commit, counters


def table(held: HeldSequence, *blocks: Iterable[int]) -> OutcomeTable:
    """For outcomes (0, TOKEN), (0, TOKEN + 1), …"""
    at = held.sequence.committed_len
    entries = [
        OutcomeEntry(
            num_accepted=0,
            next_token_id=TOKEN + row,
            proposal=Proposal(base_len=at, block_id=3 + row, token_ids=tuple(token_ids), source=ProposalSource.DRAFT),
        )
        for row, token_ids in enumerate(blocks)
    ]
    return OutcomeTable.of(1, at - 1, 0, entries)


@pytest.mark.parametrize(
    ("at_look_up", "until_the_step", "taken"),
    [(3, 4, 4), (4, 3, 4), (3, None, 3), (None, 2, 2)],  # None: nothing has come
)
def test_a_step_takes_the_longest_version_that_is_here_when_it_starts(
    at_look_up: int | None, until_the_step: int | None, taken: int
) -> None:
    held, commit, _ = held_after_a_step()
    if at_look_up:
        held.book.add(table(held, range(at_look_up)))
    held.look_up(commit)
    if until_the_step:
        held.book.add(table(held, range(until_the_step)))
    assert held.count_lookup() is True
    assert held.block is not None
    assert len(held.block) == taken


@pytest.mark.parametrize(
    ("happened", "other", "laws", "sound"),
    [
        ([1, 2, 3], [1, 2, VOCABULARY], (), True),
        ([1, 2, 3], [-1, 2, 3], (), True),
        ([1, 2, VOCABULARY], [1, 2, 3], (), False),
        ([-1, 2, 3], [1, 2, 3], (), False),
        ([1], [1], (SparseLaw(token_ids=(1,), probs=(1.0,)),) * 2, False),  # none belong to the coupled rule
    ],
)
def test_a_block_that_cannot_be_is_a_miss_and_counts_only_if_it_is_asked_for(
    happened: list[int], other: list[int], laws: tuple[SparseLaw, ...], sound: bool
) -> None:
    held, commit, counters = held_after_a_step()
    held.book.add(replace(table(held, happened, other), laws=laws))
    held.look_up(commit)
    assert held.count_lookup() is sound
    assert (held.block is not None) == sound
    assert counters.invalid == (not sound)


def test_laws_may_follow_the_block_of_a_table_only_if_that_was_agreed() -> None:
    sequence = Sequence(request(speculation=SpeculationChoice(rule=VerificationRule.REJECTION)), handle=1)
    counters = ProposerCounters()
    checks = BlockChecks(vocab_size=VOCABULARY, counters=counters)
    block = Proposal(base_len=4, block_id=1, token_ids=(2,), source=ProposalSource.DRAFT)
    assert not checks.may_judge(block, sequence.request, of_table=True)
    checks.laws_follow = True
    assert checks.may_judge(block, sequence.request, of_table=True)
    assert not checks.may_judge(block, sequence.request, of_table=False)
    assert counters.invalid == 2


@pytest.mark.parametrize("num_run", [4, 3, 0])
def test_a_launch_says_how_much_of_its_block_had_come_whatever_of_it_runs(num_run: int) -> None:
    held, commit, _ = held_after_a_step()
    held.book.add(table(held, range(4)))
    held.look_up(commit)
    held._sent_len = held.sequence.committed_len
    assert held.block is not None
    running = RunningSequence(
        sequence=held.sequence, stream=StreamId(session_id=1, stream_key=1), arrived_at=0.0, deadline=None
    )
    forward = ForwardSlice(token_ids=[TOKEN], start=commit.base_len, block_table=[0], num_logits=1)
    row = ScheduledRow(running=running, forward=forward, proposal=held.block.trimmed(num_run) if num_run else None)
    launched = held.launch(row, AHEAD)
    assert launched is not None
    assert (launched.block_id, launched.num_used, launched.num_arrived) == (3, num_run, 4)


def test_a_block_left_out_for_want_of_rows_is_no_late_block() -> None:
    """Four sequences in four rows: no block ever runs, and each is named, lest its draft keep more time free."""
    model = ScriptedConfig(vocab_size=32, slope=0.7, num_blocks=1024)
    engine = LocalEngine(
        target=model,
        draft=model,
        config=TargetConfig(max_num_seqs=4, max_num_batched_tokens=4),
        gate=GateSettings(
            preference=SpeculationPreference.ON,
            mode=SpeculationMode.CACHED,
            max_num_draft_tokens=4,
            max_branches=8,
            batch_size_threshold=None,
        ),
    )
    transport = engine.transport
    assert transport is not None
    assert transport.drafter is not None
    for index in range(4):
        engine.submit(request(max_tokens=60, noise_key=index))
    engine.step(20)
    (link,) = transport.drafter._residents.links.values()
    before, start = link.margin.seconds, len(transport.sent)
    engine.step(20)
    rows = [row for event in transport.sent[start:] if isinstance(event, Launch) for row in event.rows]
    assert len(rows) == 80
    assert all(row.num_used == 0 and row.source is None for row in rows)
    assert sum(row.block_id > 0 for row in rows) > 40
    assert all(row.num_arrived == 4 for row in rows if row.block_id)
    assert link.margin.seconds < before, "all that had come in time, and the rest was never sent"
