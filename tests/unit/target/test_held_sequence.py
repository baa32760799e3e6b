"""What the target holds of a sequence on its draft: the block that a step takes, and what it says of one left out."""

import pytest
from tests.support.local_engine import LocalEngine, request

from outrider.core.link import Launch, LaunchRow, OutcomeEntry
from outrider.core.policy import GateSettings, RoundPlan
from outrider.core.proposal import Proposal
from outrider.core.sequence import Commit, Sequence
from outrider.core.speculation import ProposalSource, SpeculationMode, SpeculationPreference, SpeculationReason
from outrider.engine.scripted import ScriptedConfig
from outrider.target.config import TargetConfig
from outrider.target.held_sequence import HeldSequence

AHEAD = RoundPlan(mode=SpeculationMode.CACHED, num_draft_tokens=4, reason=SpeculationReason.ON, branch_budget=4)
TOKEN = 5


def held_after_a_step() -> tuple[HeldSequence, Commit]:
    """A sequence that has committed one token; its step had nothing in flight."""
    sequence = Sequence(request(range(1, 10)), handle=1)
    held = HeldSequence(sequence)
    held.opening()
    assert held.acknowledge(sequence.committed_len)
    base_len = sequence.committed_len
    held.book.launch(LaunchRow(handle=1, base_len=base_len, block_id=0, num_used=0, source=None, ahead=AHEAD))
    sequence.token_ids.append(TOKEN)
    commit = Commit(
        base_len=base_len, first_token_index=0, token_ids=(TOKEN,), logprobs=(), num_accepted=0, finish=None
    )
    return held, commit


def entry(held: HeldSequence, num_tokens: int) -> OutcomeEntry:
    block = Proposal(
        base_len=held.sequence.committed_len,
        block_id=3,
        token_ids=tuple(range(num_tokens)),
        source=ProposalSource.DRAFT,
    )
    return OutcomeEntry(num_accepted=0, next_token_id=TOKEN, proposal=block)


@pytest.mark.parametrize(
    ("at_look_up", "until_the_step", "taken"),
    [(3, 4, 4), (4, 3, 4), (3, None, 3), (None, 2, 2)],  # None: nothing has come
)
def test_a_step_takes_the_longest_version_that_is_here_when_it_starts(
    at_look_up: int | None, until_the_step: int | None, taken: int
) -> None:
    held, commit = held_after_a_step()
    held.book.add([entry(held, at_look_up)] if at_look_up else [])
    held.look_up(commit)
    held.book.add([entry(held, until_the_step)] if until_the_step else [])
    assert held.count_lookup() is True
    assert held.block is not None
    assert len(held.block) == taken


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
    assert link.margin.seconds == before
