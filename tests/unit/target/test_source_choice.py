"""A draft and n-grams together: the better one by the past, chosen before any token of the round is known."""

from collections.abc import Sequence

import pytest
from tests.support.local_engine import LocalEngine, request

from outrider.core.link import DraftEvent, DraftProposal
from outrider.core.policy import GateSettings
from outrider.core.request import SequenceRequest
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import ProposalSource, SpeculationChoice, SpeculationPreference, VerificationRule
from outrider.engine.scripted import ScriptedConfig
from outrider.target.config import TargetConfig

# Four tokens: the text soon repeats itself, and copies of it are always right.
REPEATING = ScriptedConfig(vocab_size=4, slope=2.0)
VARIED = ScriptedConfig(vocab_size=32, slope=0.7)
GREEDY = SamplingParams(temperature=0.0)
GATE = GateSettings(
    preference=SpeculationPreference.ON, max_num_draft_tokens=4, batch_size_threshold=None, min_acceptance_rate=0.0
)
LOOKUP = TargetConfig(prompt_lookup_max=3, prompt_lookup_min=2)


class Watched:
    """An engine whose rounds are seen: who made each judged block."""

    def __init__(self, target: ScriptedConfig, draft: ScriptedConfig) -> None:
        self.engine = LocalEngine(target=target, draft=draft, config=LOOKUP, gate=GATE)
        self.sources: list[ProposalSource] = []
        collect = self.engine.loop.proposers.collect

        def watch(wanted):  # type: ignore[no-untyped-def]
            found = collect(wanted)
            self.sources += [block.source for block in found.values()]
            return found

        self.engine.loop.proposers.collect = watch  # type: ignore[method-assign]

    def run(self, *ones: SequenceRequest) -> list[list[int]]:
        return [one.token_ids for one in self.engine.run(*ones)]

    def share(self, source: ProposalSource) -> float:
        late = self.sources[len(self.sources) // 2 :]
        return late.count(source) / len(late)


def repeating(n: int = 2) -> list[SequenceRequest]:
    return [request([1, 2, 3, 0] * 6, max_tokens=80, noise_key=key, sampling=GREEDY) for key in range(n)]


def test_copies_take_over_where_the_text_repeats_and_the_draft_is_poor() -> None:
    plain = [one.token_ids for one in LocalEngine(target=REPEATING).run(*repeating())]
    watched = Watched(REPEATING, ScriptedConfig(vocab_size=4, slope=2.0, agreement=0.3))
    assert watched.run(*repeating()) == plain
    assert watched.share(ProposalSource.NGRAM) > 0.8


def test_a_good_draft_keeps_its_place_where_copies_are_poor() -> None:
    one = request(range(1, 20), max_tokens=80, sampling=SamplingParams())
    (plain,) = LocalEngine(target=VARIED).run(one)
    watched = Watched(VARIED, ScriptedConfig(vocab_size=32, slope=0.7, agreement=0.95))
    assert watched.run(one) == [plain.token_ids]
    assert watched.share(ProposalSource.DRAFT) > 0.9


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_of_a_round_does_not_look_at_the_drafted_ids(seed: int) -> None:
    """Every block's ids are replaced by wrong ones in one round: who was chosen in that round stays the same."""
    draft = ScriptedConfig(vocab_size=4, slope=2.0, agreement=0.7)
    cut = 6 + 3 * seed

    def run(*, spoil: bool) -> list[ProposalSource]:
        watched = Watched(REPEATING, draft)

        def tamper(events: Sequence[DraftEvent]) -> Sequence[DraftEvent]:
            if not spoil or len(watched.sources) != cut:
                return events
            return [_spoilt(event) if isinstance(event, DraftProposal) else event for event in events]

        assert watched.engine.transport is not None
        watched.engine.transport.tamper = tamper
        watched.run(*repeating(1))
        return watched.sources[: cut + 1]

    assert run(spoil=True) == run(spoil=False)


def _spoilt(event: DraftProposal) -> DraftProposal:
    block = event.proposal
    ids = tuple((token + 1) % 4 for token in block.token_ids)
    return DraftProposal(
        handle=event.handle,
        proposal=type(block)(base_len=block.base_len, block_id=block.block_id, token_ids=ids, source=block.source),
    )


def test_what_nobody_waits_for_is_no_measure_of_the_link() -> None:
    """While copies serve, the draft's answer is read after the forward: that time is not its round trip."""
    watched = Watched(REPEATING, ScriptedConfig(vocab_size=4, slope=2.0, agreement=0.3))
    engine = watched.engine
    assert engine.transport is not None
    collect, copies = engine.loop.proposers.collect, 0

    def with_slow_forward(wanted):  # type: ignore[no-untyped-def]
        nonlocal copies
        assert engine.transport is not None
        late = len(watched.sources) > 12  # the choice has settled on copies
        engine.transport.paused = late
        found = collect(wanted)
        engine.transport.paused = False
        if late:
            engine.clock.advance(0.2)
            copies += sum(block.source is ProposalSource.NGRAM for block in found.values())
        return found

    engine.loop.proposers.collect = with_slow_forward  # type: ignore[method-assign]
    watched.run(request([1, 2, 3, 0] * 6, max_tokens=160, sampling=GREEDY))
    assert copies > 5
    (link,) = engine.loop.proposers.links()
    assert link.round_trip_s < 0.02


def test_the_rejection_rule_takes_both_sources() -> None:
    watched = Watched(REPEATING, ScriptedConfig(vocab_size=4, slope=2.0, agreement=0.5))
    choice = SpeculationChoice(rule=VerificationRule.REJECTION)
    ones = [
        request([1, 2, 3, 0] * 6, max_tokens=60, noise_key=key, sampling=SamplingParams(), speculation=choice)
        for key in range(4)
    ]
    assert [len(one) for one in watched.run(*ones)] == [60] * 4
    assert set(watched.sources) == set(ProposalSource)
    assert watched.engine.loop.counters.proposers.invalid == 0
    assert not watched.engine.loop.proposers._choice._worth  # type: ignore[union-attr]
