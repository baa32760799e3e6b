"""Drafting ahead: tables under time pressure, and steps in flight that turn out to be of another text."""

import itertools
from itertools import count

import pytest
from tests.unit.draft.bench import Bench, Peer, TimedEngine

from outrider.core.link import Capability, Evicted, Launch, LaunchRow, OutcomeTable, RefusalReason
from outrider.core.policy import RoundPlan
from outrider.core.speculation import ProposalSource, SpeculationMode, SpeculationReason, VerificationRule
from outrider.engine.base import ForwardBatch

PROMPT = [5, 7, 11, 2, 9, 30, 41]
CACHED = frozenset({Capability.SEQUENTIAL, Capability.CACHED, Capability.SPARSE_LAWS})


def launch(peer: Peer, *handles: int, budget_us: int = 0, num_draft_tokens: int = 4, branch_budget: int = 4) -> None:
    """A step starts that has nothing of these sequences in flight but their last token."""
    ahead = RoundPlan(
        mode=SpeculationMode.CACHED,
        num_draft_tokens=num_draft_tokens,
        reason=SpeculationReason.ON,
        branch_budget=branch_budget,
    )
    rows = tuple(
        LaunchRow(
            handle=handle,
            base_len=len(peer.texts[handle]),
            block_id=0,
            num_used=0,
            source=None,
            token_ids=(),
            ahead=ahead,
        )
        for handle in handles
    )
    peer.say(Launch(step=1, rows=rows, budget_us=budget_us))


def test_a_step_without_branches_may_run_out_of_time() -> None:
    """With one branch row for two sequences one of them has no table; both are out of time at once."""
    bench = Bench(max_branch_rows=1)
    peer = bench.peer(capabilities=CACHED)
    peer.open(1, [*PROMPT, 1])
    peer.open(2, [*PROMPT, 2])
    launch(peer, 1, 2, budget_us=1)
    bench.settle()
    tables = peer.take(OutcomeTable)
    assert len(tables) == 1
    assert len(tables[0].entries()) == 1


def test_a_block_that_ends_its_text_does_not_cut_the_others_when_the_time_is_up() -> None:
    bench = Bench()
    peer = bench.peer(capabilities=CACHED)
    peer.open(1, PROMPT)
    launch(peer, 1, num_draft_tokens=3)
    bench.settle()
    entries = peer.take(OutcomeTable)[0].entries()
    assert all(len(one.proposal) == 3 for one in entries)
    first_ids = [one.proposal.token_ids[0] for one in entries]
    ended = first_ids[-1]
    assert first_ids.count(ended) == 1

    bench = Bench()
    peer = bench.peer(capabilities=CACHED)
    peer.open(1, PROMPT, eos_token_ids=(ended,))
    # Guesses and two steps of 2 ms; with 3 ms of margin the time is up behind the second token.
    launch(peer, 1, num_draft_tokens=3, budget_us=8_900)
    bench.settle()
    lengths = sorted(len(one.proposal) for one in peer.take(OutcomeTable)[0].entries())
    assert lengths == [1, 2, 2, 2]


def test_a_sequence_far_behind_is_prefilled_before_its_table() -> None:
    bench = Bench(max_catch_up_tokens=4, prefill_chunk_tokens=5)
    peer = bench.peer(capabilities=CACHED)
    peer.open(1, PROMPT)
    bench.engine.batches.clear()
    for token in range(20):
        peer.judge(peer.row(1, token))  # plain rounds: nothing is drafted
    launch(peer, 1, branch_budget=2)
    bench.settle()
    assert len(peer.take(OutcomeTable)) == 1
    assert max(sum(batch) for batch in bench.engine.batches) <= 5


@pytest.mark.parametrize("position", [3, len(PROMPT)])
def test_a_text_rewritten_under_a_step_in_flight_gives_up_what_was_drafted_ahead(position: int) -> None:
    """The length stays, the text does not: branches of the old text must not keep its KV from being cut."""
    bench = Bench()
    peer = bench.peer(capabilities=CACHED)
    peer.open(1, PROMPT)
    peer.judge(peer.row(1, 3))
    launch(peer, 1)
    bench.settle()
    launch(peer, 1)  # by now all of the text counts as computed
    bench.settle()
    assert len(peer.take(OutcomeTable)) == 2
    del peer.texts[1][position:]
    peer.judge(peer.row(1, 4, k=3, accepted=[6] * (len(PROMPT) - position)))
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 3)


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize("moment", range(12))
def test_a_verdict_may_come_at_any_moment_of_a_table(
    moment: int, adopted: bool, queues: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the device runs a step whose tokens are not noted yet: text and KV must stay one."""
    if queues:
        monkeypatch.setattr(TimedEngine, "wait", lambda _: None, raising=False)
    bench = Bench()
    peer = bench.peer(capabilities=CACHED)
    peer.open(1, PROMPT)
    best = peer.oracle(1, 1)[0]
    polls = count()
    said = False

    def poll() -> None:
        nonlocal said
        if next(polls) == moment:
            said = True
            peer.judge(peer.row(1, best if adopted else (best + 20) % 64, k=3))

    launch(peer, 1)
    while not said:
        if bench.drafter.has_work:
            bench.step(poll)
        else:
            poll()
    block = peer.blocks()[1].token_ids
    assert len(block) >= 3  # what was drafted ahead goes along
    assert list(block) == peer.oracle(1, len(block))
    peer.take(OutcomeTable)
    launch(peer, 1)
    bench.settle()
    entries = [one for table in peer.take(OutcomeTable) for one in table.entries()]
    assert len(entries) == 4
    text = list(peer.texts[1])
    for one in entries:
        peer.texts[1] = [*text, one.next_token_id]
        assert list(one.proposal.token_ids) == peer.oracle(1, 4)


@pytest.mark.parametrize("max_model_len", [512, len(PROMPT) + 4])
def test_every_token_of_a_greedy_block_has_its_law_under_the_rejection_rule(
    max_model_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where most of what is known of a token is found out while the device runs the next."""
    monkeypatch.setattr(TimedEngine, "wait", lambda _: None, raising=False)
    bench = Bench(max_model_len=max_model_len)
    peer = bench.peer(capabilities=CACHED)
    peer.open(1, PROMPT, rule=VerificationRule.REJECTION)
    peer.judge(peer.row(1, 3, k=3))
    blocks = [peer.blocks()[1]]
    launch(peer, 1)
    bench.settle()
    blocks += [one.proposal for one in peer.take(OutcomeTable)[0].entries()]
    for block in blocks:
        assert [law.token_ids for law in block.laws] == [(token_id,) for token_id in block.token_ids]


@pytest.mark.parametrize(
    ("budget_us", "ending", "lengths"),
    [
        (13_000, "no room beyond", [3, 4]),
        (12_000, "no room beyond", [2, 3]),  # the fourth would be too late
        (11_000, "end of text", [2, 3]),
        (9_000, "end of text", [2]),
    ],
)
def test_the_token_that_completes_the_last_block_follows_if_it_is_in_time(
    budget_us: int, ending: str, lengths: list[int]
) -> None:
    drafted = Bench()
    peer = drafted.peer(capabilities=CACHED)
    peer.open(1, PROMPT)
    launch(peer, 1, branch_budget=1)
    drafted.settle()
    block = peer.take(OutcomeTable)[0].entries()[0].proposal

    bench = Bench(max_model_len=len(PROMPT) + 4 if ending == "no room beyond" else 512)
    peer = bench.peer(capabilities=CACHED)
    peer.open(1, PROMPT, eos_token_ids=(block.token_ids[2],) if ending == "end of text" else ())
    launch(peer, 1, branch_budget=1, budget_us=budget_us)
    bench.settle()
    sent = [one.entries()[0].proposal for one in peer.take(OutcomeTable)]
    assert [one.token_ids for one in sent] == [block.token_ids[:length] for length in lengths]


@pytest.mark.parametrize(("num_blocks", "freed"), [(5, 2), (6, 1)])
def test_a_table_may_take_the_room_of_another_that_is_being_made(num_blocks: int, freed: int) -> None:
    """Launched so long ago that both count as idle: neither frees itself, nor goes on once it is freed."""
    bench = Bench(num_blocks=num_blocks)
    peer = bench.peer(capabilities=CACHED)
    for handle in (1, 2):
        peer.open(handle, [handle, *PROMPT])
    ahead = RoundPlan(mode=SpeculationMode.CACHED, num_draft_tokens=1, reason=SpeculationReason.ON, branch_budget=1)
    rows = [
        LaunchRow(
            handle=handle,
            base_len=len(PROMPT) + 1,
            block_id=0,
            num_used=7,
            source=ProposalSource.NGRAM,
            token_ids=(3,) * 7,
            ahead=ahead,
        )
        for handle in (1, 2)
    ]
    peer.say(Launch(step=1, rows=tuple(rows), budget_us=0))
    bench.clock.time += 2 * bench.config.reclaim_idle_s
    bench.settle()
    assert peer.take(Evicted) == [Evicted(handle=freed, reason=RefusalReason.NO_SPACE)]
    (table,) = peer.take(OutcomeTable)
    assert table.handle == 3 - freed
    bench.drafter.disconnect(peer.link_id)
    assert bench.kv.usage == 0.0


def test_a_sequence_that_catches_up_for_its_table_does_not_free_itself() -> None:
    bench = Bench(num_blocks=3, max_catch_up_tokens=4)
    peer = bench.peer(capabilities=CACHED)
    peer.open(1, PROMPT)
    for token in range(6):
        peer.judge(peer.row(1, token))
    launch(peer, 1)
    bench.clock.time += 2 * bench.config.reclaim_idle_s
    bench.settle()
    assert peer.take(Evicted) == [Evicted(handle=1, reason=RefusalReason.NO_SPACE)]
    assert bench.kv.usage == 0.0


@pytest.mark.parametrize("wanted", ["an opening", "a block"])
def test_what_was_drafted_ahead_makes_room_for_what_a_target_waits_for(wanted: str) -> None:
    """Branches take all the room there is. No sequence is refused or freed for their sake."""
    bench = Bench(num_blocks=18)
    peer = bench.peer(capabilities=CACHED)
    peer.open(1, PROMPT)
    peer.open(2, [8, *PROMPT])
    launch(peer, 1, branch_budget=24)
    bench.settle()
    assert len(peer.take(OutcomeTable)) == 1
    assert bench.kv.num_free_blocks == 0
    if wanted == "an opening":
        peer.open(3, [9, *PROMPT])
    else:
        peer.judge(peer.row(2, 3, k=8))
        assert list(peer.blocks()[2].token_ids) == peer.oracle(2, 8)
    peer.judge(peer.row(1, peer.oracle(1, 1)[0], k=4))
    assert list(peer.blocks()[1].token_ids) == peer.oracle(1, 4)
    assert not peer.received


def test_a_draft_that_has_just_started_finds_out_in_small_steps_what_branches_cost() -> None:
    """Each row of a step costs 10 ms: a first table of 24 branches would keep the draft for half a second."""
    bench = Bench(num_ranked=24)
    forward = bench.engine.forward

    def slow(batch: ForwardBatch):  # type: ignore[no-untyped-def]
        bench.clock.time += 0.01 * batch.num_rows
        return forward(batch)

    bench.engine.forward = slow  # type: ignore[method-assign]
    bench.drafter.warm_up()
    peer = bench.peer(capabilities=CACHED)
    peer.open(1, PROMPT)
    sizes = []
    for _ in range(6):
        launch(peer, 1, branch_budget=24, budget_us=150_000)
        bench.engine.batches.clear()
        bench.settle()
        sizes.append(max(len(batch) for batch in bench.engine.batches))
    assert sizes[0] == 3
    assert max(later / earlier for earlier, later in itertools.pairwise(sizes)) < 3
    assert max(sizes) <= 15, "the next power of two takes longer than the step"
    assert max(sizes) > 3


def test_a_verdict_on_other_tokens_than_were_launched_adopts_no_block() -> None:
    """A target that is wrong about itself still gets blocks of the text that it says it has."""
    bench = Bench()
    peer = bench.peer(capabilities=CACHED)
    peer.open(1, PROMPT)
    ahead = RoundPlan(mode=SpeculationMode.CACHED, num_draft_tokens=4, reason=SpeculationReason.ON, branch_budget=24)
    in_flight = (11, 10)
    row = LaunchRow(
        handle=1,
        base_len=len(PROMPT),
        block_id=0,
        num_used=len(in_flight),
        source=ProposalSource.NGRAM,
        token_ids=in_flight,
        ahead=ahead,
    )
    peer.say(Launch(step=1, rows=(row,), budget_us=0))
    bench.settle()
    (table,) = peer.take(OutcomeTable)
    outcome = next(one for one in table.entries() if one.num_accepted == 1)
    peer.judge(peer.row(1, outcome.next_token_id, k=4, accepted=[35]))
    block = peer.blocks()[1].token_ids
    assert list(block) == peer.oracle(1, 4) != list(outcome.proposal.token_ids)
