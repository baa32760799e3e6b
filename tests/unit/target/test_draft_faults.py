"""The draft is an accelerator, never a dependency: whatever it does, the text is the target's."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.support.local_engine import LocalEngine, request

from outrider.core.link import (
    Busy,
    DraftEvent,
    DraftProposal,
    Drain,
    Evicted,
    NeedResync,
    OpenAck,
    OpenNack,
    OpenSequence,
    RefusalReason,
)
from outrider.core.policy import GateSettings
from outrider.core.proposal import Proposal, SparseLaw
from outrider.core.request import SequenceRequest
from outrider.core.speculation import (
    ProposalSource,
    SpeculationChoice,
    SpeculationPreference,
    SpeculationReason,
    VerificationRule,
)
from outrider.draft.config import DraftConfig
from outrider.engine.scripted import ScriptedConfig
from outrider.target.config import TargetConfig

TARGET = ScriptedConfig(vocab_size=32, slope=0.7)
DRAFT = ScriptedConfig(vocab_size=32, slope=0.7, agreement=0.8)
GATE = GateSettings(preference=SpeculationPreference.ON, max_num_draft_tokens=4, batch_size_threshold=None)


def make(**changes: object) -> LocalEngine:
    settings: dict[str, object] = {"target": TARGET, "draft": DRAFT, "gate": GATE, **changes}
    return LocalEngine(**settings)  # type: ignore[arg-type]


def requests(count: int = 3, max_tokens: int = 60) -> list[SequenceRequest]:
    return [request(range(1, 4 + 3 * key), max_tokens=max_tokens, noise_key=key) for key in range(count)]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [one.token_ids for one in LocalEngine(target=TARGET).run(*requests())]


def finish(engine: LocalEngine, keys: list[int]) -> list[list[int]]:
    while engine.loop.scheduler.has_work:
        engine.loop.step()
    return [engine.results[key].token_ids for key in keys]


def test_dead_draft_costs_no_waiting_and_a_new_one_is_used(plain: list[list[int]]) -> None:
    engine = make()
    assert engine.transport is not None
    keys = [engine.submit(one) for one in requests()]
    engine.step(6)
    verified = engine.loop.counters.verified
    assert verified > 0
    engine.transport.kill_draft()
    before = engine.clock.now()
    engine.step(4)
    assert engine.loop.counters.verified == verified, "nothing is verified without a draft"
    assert engine.clock.now() == before, "and nothing is waited for"
    assert engine.running(keys[0]).last_reason is SpeculationReason.DRAFT_UNAVAILABLE
    engine.transport.start_draft()
    engine.step(6)
    assert engine.loop.counters.verified > verified
    assert finish(engine, keys) == plain
    assert engine.loop.proposers.links()[0].losses == 1


def test_silent_draft_costs_one_wait(plain: list[list[int]]) -> None:
    engine = make(config=TargetConfig(max_draft_wait_s=0.5))
    assert engine.transport is not None
    keys = [engine.submit(one) for one in requests()]
    engine.step(6)
    engine.transport.paused = True
    before, sent = engine.clock.now(), len(engine.transport.sent)
    engine.step(8)
    assert 0 < engine.clock.now() - before <= 0.5
    assert engine.loop.counters.proposers.late == 3
    assert len(engine.transport.sent) - sent <= 2, "a silent draft is not fed"
    verified = engine.loop.counters.verified
    engine.transport.paused = False
    engine.step(8)
    assert engine.loop.counters.verified > verified, "once it speaks, speculation resumes"
    assert finish(engine, keys) == plain


@pytest.mark.parametrize("count", [1, 3])
def test_what_ended_while_the_queue_was_full_is_freed_at_the_draft(count: int, plain: list[list[int]]) -> None:
    engine = make()
    transport = engine.transport
    assert transport is not None
    keys = [engine.submit(one) for one in requests()[:count]]
    engine.step(6)
    assert transport.drafter is not None
    assert transport.drafter.num_sequences == count
    transport.full = True
    assert finish(engine, keys) == plain[:count]
    assert transport.drafter.num_sequences == count, "it knows of no end"
    transport.full = False
    engine.loop.proposers.poll()
    assert transport.drafter.num_sequences == 0


def test_what_ended_while_the_queue_was_full_is_freed_beside_sequences_without_a_draft() -> None:
    engine = make()
    transport = engine.transport
    assert transport is not None
    ended = engine.submit(request(max_tokens=60))
    engine.submit(request(max_tokens=150, speculation=SpeculationChoice(preference=SpeculationPreference.OFF)))
    engine.step(6)
    transport.full = True
    while engine.results[ended].end is None:
        engine.loop.step()
    assert transport.drafter is not None
    assert transport.drafter.num_sequences == 1
    transport.full = False
    engine.step(2)
    assert engine.loop.scheduler.has_work
    assert transport.drafter.num_sequences == 0


def test_nothing_is_opened_on_a_silent_or_busy_draft() -> None:
    for busy in (False, True):
        engine = make()
        transport = engine.transport
        assert transport is not None
        engine.submit(request(max_tokens=200))
        engine.step(6)
        if busy:
            transport._incoming.append(Busy(retry_after_s=1000.0))
        else:
            transport.paused = True
        engine.step(3)
        sent = len(transport.sent)
        later = engine.submit(request(range(1, 9), max_tokens=100, noise_key=7))
        engine.step(4)
        assert not any(isinstance(one, OpenSequence) for one in transport.sent[sent:])
        transport.paused = False
        engine.clock.advance(1001.0)
        engine.step(12)
        assert any(isinstance(one, OpenSequence) for one in transport.sent[sent:])
        assert engine.running(later).sequence.stats.speculative_rounds > 0


def test_a_hop_is_half_of_what_the_way_takes_beside_the_drafting() -> None:
    engine = make(config=TargetConfig(max_draft_wait_s=0.5))
    transport = engine.transport
    assert transport is not None

    def slow(events: Sequence[DraftEvent]) -> Sequence[DraftEvent]:
        if any(isinstance(one, DraftProposal) for one in events):
            engine.clock.advance(0.004)  # both ways; this draft drafts in no time
        return events

    transport.tamper = slow
    engine.run(request(max_tokens=60))
    hops_s = list(engine.loop.counters.proposers.hops_s)
    assert len(hops_s) > 5
    assert hops_s == pytest.approx([0.002] * len(hops_s))


def test_draft_that_is_late_again_and_again_is_asked_less_and_less() -> None:
    engine = make(target=replace(TARGET, max_model_len=2000, num_blocks=600))
    transport = engine.transport
    assert transport is not None
    key = engine.submit(request(max_tokens=1000))
    engine.step(4)
    late_at: list[int] = []
    while engine.loop.scheduler.has_work and len(late_at) < 6:
        late = engine.loop.counters.proposers.late
        transport.paused = True
        engine.loop.step()
        transport.paused = False
        transport.drafter and transport.receive(0.0)
        if engine.loop.counters.proposers.late > late:
            late_at.append(engine.loop.counters.steps)
            transport._incoming.append(Busy(retry_after_s=0.0))  # it lives
    gaps = [after - before for before, after in itertools.pairwise(late_at)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 2 * gaps[0]
    assert engine.results[key].end is None


def test_random_faults_never_change_the_text(plain: list[list[int]]) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        engine = make()
        transport = engine.transport
        assert transport is not None
        held: list[DraftEvent] = []

        def tamper(
            events: Sequence[DraftEvent], rng: random.Random = rng, held: list[DraftEvent] = held
        ) -> list[DraftEvent]:
            out: list[DraftEvent] = []
            for event in events:
                fate = rng.random()
                if fate < 0.15:
                    held.append(event)  # late
                elif fate < 0.25:
                    out += [event, event]  # twice
                elif fate < 0.3:
                    continue  # lost
                elif fate < 0.45 and isinstance(event, DraftProposal):
                    block = event.proposal
                    ids = tuple(rng.randrange(-2, 40) for _ in range(rng.randrange(0, 9)))
                    moved = replace(block, token_ids=ids, base_len=block.base_len + rng.randrange(-3, 3))
                    out.append(replace(event, proposal=moved, handle=event.handle + rng.randrange(-1, 2)))
                elif fate < 0.5:
                    out += [event, NeedResync(handle=1, have_len=rng.randrange(-1, 90))]
                else:
                    out.append(event)
            if held and rng.random() < 0.5:
                out.append(held.pop(rng.randrange(len(held))))
            return out

        transport.tamper = tamper
        keys = [engine.submit(one) for one in requests()]
        while engine.loop.scheduler.has_work:
            fate = rng.random()
            if fate < 0.03 and transport.drafter is not None:
                transport.kill_draft()
            elif fate < 0.2 and transport.drafter is None:
                transport.start_draft()
            transport.paused = rng.random() < 0.2
            transport.full = rng.random() < 0.1
            engine.clock.advance(0.3)
            engine.loop.step()
        assert [engine.results[key].token_ids for key in keys] == plain, f"seed {seed}"
        assert engine.loop.counters.verified > 0, f"seed {seed}"
        assert engine.loop.scheduler.kv_usage == 0.0


def test_garbage_is_counted_and_dropped(plain: list[list[int]]) -> None:
    engine = make()
    transport = engine.transport
    assert transport is not None

    def garbage(events: Sequence[DraftEvent]) -> list[DraftEvent]:
        out: list[DraftEvent] = []
        for event in events:
            if isinstance(event, DraftProposal):
                bad = replace(event.proposal, token_ids=(32,) * len(event.proposal))
                out.append(replace(event, proposal=bad))
            else:
                out.append(event)
        return out

    transport.tamper = garbage
    keys = [engine.submit(one) for one in requests()]
    assert finish(engine, keys) == plain
    assert engine.loop.counters.proposers.invalid > 0
    assert engine.loop.counters.verified == 0


@pytest.mark.parametrize(
    "law",
    [
        SparseLaw(token_ids=(1, 2), probs=(0.5, 0.6)),
        SparseLaw(token_ids=(2, 3), probs=(0.5, 0.5)),
        SparseLaw(token_ids=(1, 1), probs=(0.5, 0.5)),
        SparseLaw(token_ids=(1, 99), probs=(0.5, 0.5)),
        SparseLaw(token_ids=(1, 2), probs=(1.0,)),
        SparseLaw(token_ids=(1, 2), probs=(1.5, -0.5)),
        SparseLaw(token_ids=(1,), probs=(float("nan"),)),
        SparseLaw(token_ids=(1, 2), probs=(0.0, 1.0)),
        SparseLaw(token_ids=(1, 2), probs=(0.5, 0.4993)),
    ],
)
def test_laws_that_cannot_be_are_dropped(law: SparseLaw) -> None:
    engine = make()
    transport = engine.transport
    assert transport is not None

    def lie(events: Sequence[DraftEvent]) -> list[DraftEvent]:
        return [
            replace(event, proposal=replace(event.proposal, token_ids=(1,), laws=(law,)))
            if isinstance(event, DraftProposal)
            else event
            for event in events
        ]

    transport.tamper = lie
    (result,) = engine.run(request(speculation=SpeculationChoice(rule=VerificationRule.REJECTION)))
    assert len(result.token_ids) == 24
    assert engine.loop.counters.verified == 0
    assert engine.loop.counters.proposers.invalid > 0


def test_blocks_for_unknown_sequences_are_ignored(plain: list[list[int]]) -> None:
    engine = make()
    transport = engine.transport
    assert transport is not None
    ghost = Proposal(base_len=5, block_id=9, token_ids=(1,), source=ProposalSource.DRAFT)
    transport.tamper = lambda events: [*events, DraftProposal(handle=777, proposal=ghost)]
    keys = [engine.submit(one) for one in requests()]
    assert finish(engine, keys) == plain


def test_refused_sequence_decodes_plainly_and_says_why() -> None:
    engine = make()
    transport = engine.transport
    assert transport is not None
    transport.tamper = lambda events: [
        OpenNack(handle=event.handle, reason=RefusalReason.CONTEXT_TOO_LONG) if isinstance(event, OpenAck) else event
        for event in events
    ]
    (result,) = engine.run(request(max_tokens=30))
    assert len(result.token_ids) == 30
    assert result.end is not None
    assert result.end.speculation.reason is SpeculationReason.CONTEXT_TOO_LONG


def test_draft_context_shorter_than_the_text() -> None:
    """Past the draft's context that sequence alone decodes plainly; the others go on."""
    short = replace(DRAFT, max_model_len=24)
    engine = make(draft=short)
    one, two = engine.run(request(range(1, 11), max_tokens=60), request([1], max_tokens=12))
    (solo,) = LocalEngine(target=TARGET).run(request(range(1, 11), max_tokens=60))
    assert one.token_ids == solo.token_ids
    assert one.end is not None
    assert one.end.speculation.reason is SpeculationReason.CONTEXT_TOO_LONG
    assert two.end is not None
    assert two.end.speculation.stats.verified > 0


def test_draft_without_kv_heals_itself(plain: list[list[int]]) -> None:
    """A draft pool for one sequence only: the others are refused, evicted and served later."""
    engine = make(draft=replace(DRAFT, num_blocks=8), draft_config=DraftConfig(reclaim_idle_s=0.001))
    keys = [engine.submit(one) for one in requests()]
    assert finish(engine, keys) == plain
    assert engine.loop.counters.verified > 0


def test_evicted_sequence_is_opened_again(plain: list[list[int]]) -> None:
    engine = make()
    transport = engine.transport
    assert transport is not None
    keys = [engine.submit(one) for one in requests()]
    engine.step(5)
    transport._incoming += [Evicted(handle=1, reason=RefusalReason.IDLE)]
    assert finish(engine, keys) == plain


def test_draining_draft_gets_no_new_sequences() -> None:
    engine = make()
    transport = engine.transport
    assert transport is not None
    first = engine.submit(request(max_tokens=80))
    engine.step(5)
    transport._incoming += [Drain(reason="swap")]
    engine.step(1)
    second = engine.submit(request(max_tokens=20))
    finish(engine, [first, second])
    ends = [engine.results[key].end for key in (first, second)]
    assert ends[0] is not None
    assert ends[0].speculation.stats.verified > 0
    assert ends[1] is not None
    assert ends[1].speculation.stats.verified == 0


def test_busy_draft_is_left_alone_until_it_said() -> None:
    engine = make()
    transport = engine.transport
    assert transport is not None
    key = engine.submit(request(max_tokens=200))
    engine.step(5)
    transport._incoming += [Busy(retry_after_s=5.0)]
    engine.step(1)
    verified, sent = engine.loop.counters.verified, len(transport.sent)
    engine.step(5)
    assert engine.loop.counters.verified <= verified + 4
    assert len(transport.sent) == sent
    assert engine.running(key).last_reason is SpeculationReason.DRAFT_BUSY
    engine.clock.advance(6.0)
    engine.step(5)
    assert engine.loop.counters.verified > verified + 4


def test_everything_is_freed_on_both_sides() -> None:
    engine = make()
    transport = engine.transport
    assert transport is not None
    engine.run(*requests())
    transport.receive(0.0)
    assert transport.drafter is not None
    assert transport.drafter._residents.kv.usage == 0.0
    assert engine.loop.scheduler.kv_usage == 0.0
