"""Cached mode: blocks pushed ahead for likely outcomes. The text stays the target's; hits cost no round trip."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.support.local_engine import LocalEngine, request

from outrider.core.link import DraftEvent, LinkEvent, OutcomeTable, Ping
from outrider.core.policy import GateSettings
from outrider.core.request import SequenceRequest
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import (
    SpeculationChoice,
    SpeculationMode,
    SpeculationPreference,
    SpeculationReason,
    VerificationRule,
)
from outrider.engine.scripted import ScriptedConfig

TARGET = ScriptedConfig(vocab_size=32, slope=0.7, num_blocks=512)
DRAFT = replace(TARGET, agreement=0.8, num_blocks=4096)


def gate(k: int, branches: int = 8) -> GateSettings:
    return GateSettings(
        preference=SpeculationPreference.ON,
        mode=SpeculationMode.CACHED,
        max_num_draft_tokens=k,
        max_branches=branches,
        batch_size_threshold=None,
    )


def requests(
    size: int, sampling: SamplingParams, rule: VerificationRule = VerificationRule.COUPLED
) -> list[SequenceRequest]:
    return [
        request(
            range(1, 3 + 5 * index),
            max_tokens=30 + 3 * index,
            noise_key=1000 + index,
            sampling=sampling,
            speculation=SpeculationChoice(rule=rule),
        )
        for index in range(size)
    ]


def texts(engine: LocalEngine, wanted: list[SequenceRequest]) -> list[list[int]]:
    return [one.token_ids for one in engine.run(*wanted)]


@pytest.mark.parametrize(("k", "size"), list(itertools.product(range(1, 9), (1, 2, 5))))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_text_as_plain_decoding(k: int, size: int, temperature: float) -> None:
    wanted = requests(size, SamplingParams(temperature=temperature))
    plain = texts(LocalEngine(target=TARGET), wanted)
    engine = LocalEngine(target=TARGET, draft=DRAFT, gate=gate(k))
    assert texts(engine, wanted) == plain
    counters = engine.loop.counters
    assert counters.proposers.hits > 0
    assert counters.proposers.invalid == counters.proposers.late == 0
    assert engine.loop.scheduler.kv_usage == 0.0
    drafter = engine.transport.drafter if engine.transport is not None else None
    assert drafter is not None
    engine.transport.receive(0.0)  # type: ignore[union-attr]
    assert drafter._residents.kv.usage == 0.0
    assert drafter.counters.adopted >= counters.proposers.hits
    assert drafter.counters.drift == drafter.counters.resyncs == 0


def test_batch_of_sixteen_mixed_with_sequences_that_do_not_speculate() -> None:
    wanted = requests(16, SamplingParams())
    wanted[3] = replace(wanted[3], speculation=SpeculationChoice(preference=SpeculationPreference.OFF))
    wanted[7] = replace(wanted[7], speculation=SpeculationChoice(max_tokens=2))
    plain = texts(LocalEngine(target=replace(TARGET, num_blocks=2048)), wanted)
    engine = LocalEngine(target=replace(TARGET, num_blocks=2048), draft=DRAFT, gate=gate(5))
    assert texts(engine, wanted) == plain
    assert engine.loop.counters.proposers.hits > 0


@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_oracle_draft_hits_every_time(k: int) -> None:
    """A draft that is the target: every block accepted whole, every outcome the likeliest of its table."""
    engine = LocalEngine(target=TARGET, draft=replace(TARGET, num_blocks=4096), gate=gate(k, branches=6))
    (result,) = engine.run(request(max_tokens=200))
    counters = engine.loop.counters
    assert len(result.token_ids) == 200
    assert counters.accepted == counters.verified > 0
    # The first look-up has no table yet; near the end the last block may be cut.
    assert counters.proposers.hits >= counters.proposers.lookups - 2


def test_hits_cost_no_round_trip() -> None:
    """In a step that follows a hit, nothing is received between the look-up and the forward."""
    engine = LocalEngine(target=TARGET, draft=replace(TARGET, num_blocks=4096), gate=gate(4))
    transport = engine.transport
    assert transport is not None
    engine.submit(request(max_tokens=120))
    engine.step(8)
    waited: list[float] = []
    receive = transport.receive

    def watched(timeout_s: float) -> list[LinkEvent]:
        waited.append(timeout_s)
        return receive(timeout_s)

    transport.receive = watched  # type: ignore[method-assign]
    hits = engine.loop.counters.proposers.hits
    engine.step(6)
    assert engine.loop.counters.proposers.hits - hits == 6
    assert set(waited) == {0.0}, "the target only looked at what had arrived"


def test_rejection_rule_follows_the_same_law() -> None:
    """First token behind a block of one, over many seeds: chi-square against the target's law."""
    engine = LocalEngine(
        target=replace(TARGET, vocab_size=8, num_blocks=4096),
        draft=replace(DRAFT, vocab_size=8, agreement=0.5, num_blocks=16384),
        gate=gate(3),
    )
    seeds = 2000
    wanted = [
        request(
            [1, 2], max_tokens=4, noise_key=seed * 7919, speculation=SpeculationChoice(rule=VerificationRule.REJECTION)
        )
        for seed in range(seeds)
    ]
    results = []
    for start in range(0, seeds, 50):
        results += engine.run(*wanted[start : start + 50])
    plain = LocalEngine(target=replace(TARGET, vocab_size=8, num_blocks=4096))
    expected = []
    for start in range(0, seeds, 50):
        expected += plain.run(*wanted[start : start + 50])
    assert engine.loop.counters.proposers.hits > 100
    for position in range(4):
        ours = [sum(one.token_ids[position] == token for one in results) for token in range(8)]
        theirs = [sum(one.token_ids[position] == token for one in expected) for token in range(8)]
        distance = sum((a - b) ** 2 / (a + b) for a, b in zip(ours, theirs, strict=True) if a + b)
        assert distance < 24.3, f"position {position}: {ours} {theirs}"  # chi-square, 7 degrees, p = 0.001


def test_faults_never_change_the_text() -> None:
    wanted = requests(3, SamplingParams())
    plain = texts(LocalEngine(target=TARGET), wanted)
    for seed in range(8):
        rng = random.Random(seed)
        engine = LocalEngine(target=TARGET, draft=DRAFT, gate=gate(4))
        transport = engine.transport
        assert transport is not None

        def tamper(events: Sequence[DraftEvent], rng: random.Random = rng) -> list[DraftEvent]:
            out: list[DraftEvent] = []
            for event in events:
                fate = rng.random()
                if fate < 0.1:
                    continue
                if fate < 0.2:
                    out += [event, event]
                elif fate < 0.35 and isinstance(event, OutcomeTable):
                    moved = replace(
                        event,
                        num_accepted=tuple(max(0, one + rng.randrange(-1, 2)) for one in event.num_accepted),
                        next_token_ids=tuple(rng.randrange(-1, 34) for _ in event.next_token_ids),
                        base_len=event.base_len + rng.randrange(-1, 2),
                    )
                    out.append(moved)
                else:
                    out.append(event)
            rng.shuffle(out)
            return out

        transport.tamper = tamper
        keys = [engine.submit(one) for one in wanted]
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


def test_silent_draft_is_given_up_without_waiting() -> None:
    engine = LocalEngine(target=TARGET, draft=DRAFT, gate=gate(4))
    transport = engine.transport
    assert transport is not None
    for index in range(3):
        engine.submit(request(max_tokens=200, noise_key=index))
    engine.step(6)
    transport.paused = True
    before = engine.clock.now()
    sent = len(transport.sent)
    engine.step(20)
    assert engine.clock.now() == before
    fed = len(transport.sent) - sent
    engine.step(2)
    assert len(transport.sent) - sent == fed, "after a while a silent draft is fed no more"
    transport.paused = False
    hits = engine.loop.counters.proposers.hits
    engine.step(10)
    assert engine.loop.counters.proposers.hits > hits, "once it speaks, hits are back"


def test_draft_with_nothing_to_say_is_asked_and_stays_trusted() -> None:
    engine = LocalEngine(target=TARGET, draft=DRAFT, gate=gate(4))
    transport = engine.transport
    assert transport is not None
    for index in range(3):
        engine.submit(request(max_tokens=200, noise_key=index))
    engine.step(6)
    transport.tamper = lambda events: [one for one in events if not isinstance(one, OutcomeTable)]
    for _ in range(50):
        engine.step()
        engine.clock.advance(0.2)
    assert engine.loop.proposers.problem() is None
    assert sum(isinstance(one, Ping) for one in transport.sent) > 2
    transport.tamper = lambda events: events
    hits = engine.loop.counters.proposers.hits
    engine.step(6)
    assert engine.loop.counters.proposers.hits > hits


def test_draft_that_was_given_up_is_asked_until_it_answers() -> None:
    engine = LocalEngine(target=TARGET, draft=DRAFT, gate=gate(4))
    transport = engine.transport
    assert transport is not None
    for index in range(3):
        engine.submit(request(max_tokens=400, noise_key=index))
    engine.step(6)
    transport.tamper = lambda events: []
    engine.step(40)
    assert engine.loop.proposers.problem() is SpeculationReason.DRAFT_UNAVAILABLE
    transport.tamper = lambda events: events
    engine.clock.advance(2.0)
    hits = engine.loop.counters.proposers.hits
    engine.step(8)
    assert engine.loop.counters.proposers.hits > hits
