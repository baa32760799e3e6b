"""Rejection rule in cached mode: laws follow their block while it is verified, and may come late, wrong or never."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest
from tests.support.local_engine import LocalEngine, Result, request

from outrider.core.link import Busy, Capability, CloseSequence, DraftEvent, LinkDown, OutcomeTable
from outrider.core.policy import GateSettings
from outrider.core.proposal import BlockLaws, SparseLaw
from outrider.core.request import SequenceRequest
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import SpeculationChoice, SpeculationMode, SpeculationPreference, VerificationRule
from outrider.draft import drafter
from outrider.engine.scripted import ScriptedConfig
from outrider.target.draft_checks import check_proposal
from outrider.target.proposers import ProposerCounters

TARGET = ScriptedConfig(vocab_size=16, slope=0.7, num_blocks=2048)
DRAFT = replace(TARGET, agreement=0.6, num_blocks=8192)
GATE = GateSettings(
    preference=SpeculationPreference.ON,
    mode=SpeculationMode.CACHED,
    max_num_draft_tokens=4,
    max_branches=8,
    batch_size_threshold=None,
)
RATIO = SpeculationChoice(rule=VerificationRule.REJECTION)
LAW = SparseLaw(token_ids=(1, 2), probs=(0.5, 0.5))

Tamper = Callable[[Sequence[DraftEvent]], list[DraftEvent]]
E = TypeVar("E")


def make(*, draft: ScriptedConfig = DRAFT, tamper: Tamper | None = None) -> LocalEngine:
    engine = LocalEngine(target=TARGET, draft=draft, gate=GATE)
    assert engine.transport is not None
    if tamper is not None:
        engine.transport.tamper = tamper
    return engine


def requests(count: int = 3, max_tokens: int = 60, sampling: SamplingParams | None = None) -> list[SequenceRequest]:
    return [
        request([1 + key % 5, 2], max_tokens=max_tokens, noise_key=97 * key, speculation=RATIO, sampling=sampling)
        for key in range(count)
    ]


def proposers(engine: LocalEngine) -> ProposerCounters:
    return engine.loop.counters.proposers


def changed(change: Callable[[BlockLaws], Sequence[DraftEvent]]) -> Tamper:
    """Every message of laws becomes what `change` makes of it."""
    return lambda events: [new for one in events for new in (change(one) if isinstance(one, BlockLaws) else [one])]


def stale_laws(engine: LocalEngine) -> int:
    """Laws that were dropped: a miss makes the block before it stale, too."""
    counters = proposers(engine)
    return counters.stale - (counters.lookups - counters.hits)


def late_in_requests(results: Sequence[Result]) -> int:
    return sum(one.end.speculation.stats.late_laws for one in results if one.end is not None)


def laws_sent(engine: LocalEngine) -> int:
    """By the draft."""
    assert engine.transport is not None
    assert engine.transport.drafter is not None
    return engine.transport.drafter.counters.late_laws


def seen(kind: type[E], into: list[E]) -> Tamper:
    """Change nothing; keep what comes of one kind."""

    def watch(events: Sequence[DraftEvent]) -> list[DraftEvent]:
        into.extend(one for one in events if isinstance(one, kind))
        return list(events)

    return watch


def test_a_table_holds_ids_and_every_hit_gets_its_laws() -> None:
    tables: list[OutcomeTable] = []
    engine = make(tamper=seen(OutcomeTable, tables))
    results = engine.run(*requests())
    counters = proposers(engine)
    assert not any(entry.proposal.laws for table in tables for entry in table.entries())
    assert counters.hits == laws_sent(engine) > 20
    assert sum(len(one.entries()) for one in tables) > 4 * counters.hits
    assert counters.late_laws == counters.invalid == late_in_requests(results) == 0


def test_the_oracle_draft_is_accepted_whole() -> None:
    """Equal laws: the ratio is 1 for every token, if each is judged by the law that it was drawn from."""
    engine = make(draft=replace(TARGET, num_blocks=8192))
    engine.run(*requests(max_tokens=150))
    counters = engine.loop.counters
    assert counters.accepted == counters.verified > 300
    assert counters.proposers.late_laws == 0


def every(nth: int, otherwise: Callable[[BlockLaws], Sequence[DraftEvent]]) -> Tamper:
    """The first, (n + 1)-th, … message of laws becomes what `otherwise` makes of it."""
    count = 0

    def fate(event: BlockLaws) -> Sequence[DraftEvent]:
        nonlocal count
        count += 1
        return otherwise(event) if count % nth == 1 % nth else [event]

    return changed(fate)


FATES: dict[str, Callable[[], Tamper]] = {
    "in time": lambda: list,
    "every second lost": lambda: every(2, lambda _: []),
    "every third garbage": lambda: every(3, lambda event: [replace(event, laws=event.laws[:-1])]),
    "never": lambda: every(1, lambda _: []),
}


@pytest.mark.parametrize("fate", FATES)
def test_the_committed_tokens_follow_the_law_of_the_target(fate: str) -> None:
    """The scripted law is one of ranks, the same for every text: so all committed tokens are one sample of it.

    Apart for texts where draft and target disagree: there what the draft draws is not what is wanted.
    """
    engine = make(tamper=FATES[fate]())
    target, draft = engine.engine, drafter_engine(engine)
    ranks: dict[bool, list[int]] = {agree: [0] * TARGET.vocab_size for agree in (False, True)}
    for start in range(0, 96, 48):
        wanted = [replace(one, noise_key=one.noise_key + 100_003 * start) for one in requests(48, max_tokens=40)]
        for one, result in zip(wanted, engine.run(*wanted), strict=True):
            text = list(one.prompt_token_ids)
            for token_id in result.token_ids:
                favourite = target.favourite(text)  # type: ignore[attr-defined]
                ranks[draft.favourite(text) == favourite][(token_id - favourite) % TARGET.vocab_size] += 1
                text.append(token_id)
    assert proposers(engine).hits > 500
    assert (proposers(engine).late_laws == 0) == (fate == "in time")
    weights = [2.718281828459045 ** (-TARGET.slope * rank) for rank in range(TARGET.vocab_size)]
    for counts in ranks.values():
        # The ranks from 5 on count as one, so that every cell expects enough.
        seen = [*counts[:5], sum(counts[5:])]
        expected = [sum(counts) * sum(part) / sum(weights) for part in (*([one] for one in weights[:5]), weights[5:])]
        assert min(expected) > 8
        distance = sum((a - b) ** 2 / b for a, b in zip(seen, expected, strict=True))
        assert distance < 20.5, f"{seen} where {expected} are expected"  # chi-square, 5 degrees, p = 0.001


def drafter_engine(engine: LocalEngine):  # type: ignore[no-untyped-def]
    assert engine.transport is not None
    assert engine.transport.drafter is not None
    return engine.transport.drafter._engine


@pytest.mark.parametrize("fate", ["every second lost", "every third garbage", "never"])
def test_a_block_without_its_laws_still_counts(fate: str) -> None:
    """It is judged as if its tokens had been certain: some are accepted, and the round is one of speculation."""
    engine = make(tamper=FATES[fate]())
    results = engine.run(*requests(6))
    counters = engine.loop.counters
    assert late_in_requests(results) == counters.proposers.late_laws > 0
    assert 0 < counters.accepted < counters.verified
    assert (counters.proposers.invalid > 0) == (fate == "every third garbage")
    assert counters.proposers.late == 0
    assert [len(one.token_ids) for one in results] == [60] * 6


@pytest.mark.parametrize(
    "laws",
    [
        lambda laws: (),
        lambda laws: laws[1:],
        lambda laws: (*laws, laws[0]),
        lambda laws: tuple(replace(law, token_ids=law.token_ids[:-1]) for law in laws),
        lambda laws: tuple(replace(law, probs=tuple(2 * prob for prob in law.probs)) for law in laws),
        lambda laws: tuple(replace(law, probs=tuple(0.99 * prob for prob in law.probs)) for law in laws),
        lambda laws: tuple(replace(law, probs=(float("nan"), *law.probs[1:])) for law in laws),
        lambda laws: tuple(SparseLaw(token_ids=(99,), probs=(1.0,)) for _ in laws),
        lambda laws: tuple(SparseLaw(token_ids=(-1,), probs=(1.0,)) for _ in laws),
        lambda laws: tuple(SparseLaw(token_ids=(3, 3), probs=(0.5, 0.5)) for _ in laws),
    ],
)
def test_laws_that_cannot_be_those_of_their_tokens_are_refused(
    laws: Callable[[tuple[SparseLaw, ...]], tuple[SparseLaw, ...]],
) -> None:
    engine = make(tamper=changed(lambda event: [replace(event, laws=laws(event.laws))]))
    results = engine.run(*requests())
    counters = proposers(engine)
    assert counters.invalid == counters.late_laws == counters.hits > 0
    assert late_in_requests(results) == counters.late_laws
    assert stale_laws(engine) == 0


@pytest.mark.parametrize(
    "other",
    [
        lambda event: replace(event, block_id=event.block_id + 1),
        lambda event: replace(event, base_len=event.base_len - 1),
        lambda event: replace(event, handle=event.handle + 100),
        lambda event: replace(event, handle=event.handle % 3 + 1),
    ],
)
def test_laws_of_something_else_are_dropped(other: Callable[[BlockLaws], BlockLaws]) -> None:
    engine = make(tamper=changed(lambda event: [other(event)]))
    results = engine.run(*requests())
    counters = proposers(engine)
    assert stale_laws(engine) == counters.late_laws == counters.hits > 0
    assert late_in_requests(results) == counters.late_laws
    assert counters.invalid == 0


def test_laws_that_come_twice_count_once() -> None:
    engine = make(tamper=changed(lambda event: [event, event]))
    texts = [one.token_ids for one in engine.run(*requests())]
    counters = proposers(engine)
    assert stale_laws(engine) == counters.hits > 0
    assert counters.late_laws == counters.invalid == 0
    assert texts == [one.token_ids for one in make().run(*requests())]


def test_laws_that_come_in_the_next_step_are_late() -> None:
    """Held back until the step's judgement is over: dropped then, whatever the sequence does meanwhile."""
    held: list[DraftEvent] = []

    def hold(events: Sequence[DraftEvent]) -> list[DraftEvent]:
        out, held[:] = [*held], [one for one in events if isinstance(one, BlockLaws)]
        return [*out, *(one for one in events if not isinstance(one, BlockLaws))]

    engine = make(tamper=hold)
    results = engine.run(*requests())
    counters = proposers(engine)
    assert counters.late_laws == late_in_requests(results) == counters.hits > 0
    assert counters.late_laws - 3 <= stale_laws(engine) <= counters.late_laws, "all but those of the last steps"
    assert counters.invalid == 0


def test_laws_of_a_sequence_that_has_ended_are_dropped_and_counted() -> None:
    engine = make()
    transport = engine.transport
    assert transport is not None
    engine.run(*requests(1))
    stale = proposers(engine).stale
    (closed,) = [one.handle for one in transport.sent if isinstance(one, CloseSequence)]
    transport._incoming.append(BlockLaws(handle=closed, base_len=7, block_id=3, laws=(LAW,)))
    engine.loop.proposers.poll()
    assert proposers(engine).stale == stale + 1


def test_a_link_that_breaks_under_a_step_costs_its_laws_alone() -> None:
    engine = make()
    transport = engine.transport
    assert transport is not None
    keys = [engine.submit(one) for one in requests()]
    engine.step(8)
    verified, late = engine.loop.counters.verified, proposers(engine).late_laws
    transport.tamper = lambda events: [LinkDown(link_id=1, cause="cut")] if has_laws(events) else events  # type: ignore[list-item]
    engine.step(1)
    assert engine.loop.counters.verified > verified
    assert proposers(engine).late_laws > late
    while engine.loop.scheduler.has_work:
        engine.loop.step()
    assert [len(engine.results[key].token_ids) for key in keys] == [60] * 3


def has_laws(events: Sequence[DraftEvent]) -> bool:
    return any(isinstance(one, BlockLaws) for one in events)


def test_preemption_aborts_and_repairs_leave_nothing_behind() -> None:
    engine = LocalEngine(target=replace(TARGET, num_blocks=40), draft=DRAFT, gate=GATE)
    transport = engine.transport
    assert transport is not None
    keys = [engine.submit(one) for one in requests(8, max_tokens=40)]
    for step in range(400):
        if step % 7 == 3:
            transport.full = not transport.full  # what was to be sent is lost: sequences are opened anew
        if step == 9:
            engine.loop.end(engine.running(keys[0]))
        engine.step()
        engine.clock.advance(0.3)
    assert not engine.loop.scheduler.has_work
    assert engine.loop.scheduler.num_preemptions > 0
    assert [len(engine.results[key].token_ids) for key in keys[1:]] == [40] * 7
    transport.full = False
    engine.loop.proposers.poll()
    assert transport.drafter is not None
    engine.clock.advance(1000.0)
    transport.drafter.tick()  # frees those whose end was lost, too
    assert transport.drafter._residents.kv.usage == engine.loop.scheduler.kv_usage == 0.0


def test_greedy_requests_need_no_laws() -> None:
    wanted = requests(sampling=SamplingParams(temperature=0.0))
    plain = [one.token_ids for one in LocalEngine(target=TARGET).run(*wanted)]
    engine = make()
    assert [one.token_ids for one in engine.run(*wanted)] == plain
    assert proposers(engine).hits > 0
    assert proposers(engine).late_laws == proposers(engine).invalid == 0
    assert laws_sent(engine) == 0


class TestWaiting:
    """What a step may wait for laws that have not come by its end."""

    def silent(self, step_s: float, rows: int = 3) -> LocalEngine:
        """An engine whose steps are believed to take so long, and whose draft sends no laws any more."""
        engine = make()
        for one in requests(rows, max_tokens=400):
            engine.submit(one)
        engine.step(8)
        engine.loop.counters.verify_times.predict = lambda _: step_s  # type: ignore[method-assign, assignment]
        assert engine.transport is not None
        engine.transport.tamper = changed(lambda _: [])
        return engine

    def test_a_tenth_of_the_step_where_every_row_lacks_its_laws(self) -> None:
        engine = self.silent(step_s=1.0)
        before, late = engine.clock.now(), proposers(engine).late_laws
        engine.step()
        lacking = proposers(engine).late_laws - late
        assert 0 < lacking <= 3
        assert engine.clock.now() - before == pytest.approx(0.1 * lacking / 3)

    def test_never_longer_than_any_wait_for_the_draft(self) -> None:
        engine = self.silent(step_s=60.0, rows=1)
        before = engine.clock.now()
        engine.step()
        assert engine.clock.now() - before == pytest.approx(engine.config.max_draft_wait_s)

    def test_not_after_laws_that_were_late_until_some_come_in_time(self) -> None:
        engine = self.silent(step_s=1.0)
        engine.step()
        before = engine.clock.now()
        engine.step(4)
        assert engine.clock.now() == before
        assert engine.transport is not None
        engine.transport.tamper = lambda events: events
        engine.step(3)
        assert engine.clock.now() == before, "nothing is waited for that is here"
        engine.transport.tamper = changed(lambda _: [])
        engine.step()
        assert engine.clock.now() > before


class TestOtherVersions:
    """A side that does not know late laws."""

    def test_a_draft_without_them_sends_its_laws_in_the_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(drafter, "_CAPABILITIES", drafter._CAPABILITIES - {Capability.LATE_LAWS})
        tables: list[OutcomeTable] = []
        engine = make(tamper=seen(OutcomeTable, tables))
        texts = [one.token_ids for one in engine.run(*requests())]
        assert all(len(entry.proposal.laws) == len(entry.proposal) for table in tables for entry in table.entries())
        assert proposers(engine).hits > 0
        assert proposers(engine).late_laws == proposers(engine).invalid == laws_sent(engine) == 0
        monkeypatch.undo()
        assert texts == [one.token_ids for one in make().run(*requests())], "the way of the laws changes no token"

    def test_its_table_without_laws_is_refused(self) -> None:
        one = requests(1)[0]
        tables: list[OutcomeTable] = []
        make(tamper=seen(OutcomeTable, tables)).run(one)
        block = tables[0].entries()[0].proposal
        assert check_proposal(block, one, vocab_size=16, laws_follow=True)
        assert not check_proposal(block, one, vocab_size=16)
        wrong = replace(block, laws=(LAW,) * (len(block) + 1))
        assert not check_proposal(wrong, one, vocab_size=16, laws_follow=True)
        coupled = replace(one, speculation=SpeculationChoice())
        assert check_proposal(block, coupled, vocab_size=16)
        assert not check_proposal(replace(block, laws=(LAW,) * len(block)), coupled, vocab_size=16, laws_follow=True)


def test_a_block_that_the_draft_is_not_told_of_is_judged_without_waiting() -> None:
    """A draft that has said it is busy gets no Launch; its block is here, its laws never will be."""
    engine = make()
    assert engine.transport is not None
    for one in requests(1, max_tokens=400):
        engine.submit(one)
    engine.step(8)
    verified, late = engine.loop.counters.verified, proposers(engine).late_laws
    engine.loop.counters.verify_times.predict = lambda _: 1.0  # type: ignore[method-assign, assignment]
    engine.transport._incoming.append(Busy(retry_after_s=9.0))
    before = engine.clock.now()
    engine.step()
    assert engine.clock.now() == before
    assert engine.loop.counters.verified > verified
    assert proposers(engine).late_laws == late + 1
