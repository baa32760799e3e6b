"""Every mode, K from 1 to 8, batches of 1 to 16 mixed requests, under a draft that fails in every way at random
moments: the text is that of plain decoding, token by token. Deterministic: the moments follow from a seed."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.support.local_engine import LocalEngine, request
from tests.support.loopback import LoopbackTransport, ManualClock
from torch import Tensor

from outrider.core.link import Busy, DraftEvent, DraftProposal, Evicted, NeedResync, OutcomeTable, RefusalReason
from outrider.core.policy import GateSettings
from outrider.core.proposal import Proposal, SparseLaw
from outrider.core.request import SequenceRequest
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import SpeculationChoice, SpeculationMode, SpeculationPreference, VerificationRule
from outrider.engine.base import ForwardBatch
from outrider.engine.scripted import ScriptedConfig, ScriptedEngine
from outrider.target.config import TargetConfig

TARGET = ScriptedConfig(vocab_size=32, slope=0.7, num_blocks=1024)
DRAFT = replace(TARGET, agreement=0.8, num_blocks=8192)
STEP_S = 0.2
PAUSE_S = 5.0
FAULTS = ("killed", "paused", "full", "late", "twice", "lost", "shuffled", "garbage")
MODES: dict[str, tuple[SpeculationMode | None, int]] = {
    "sequential": (SpeculationMode.SEQUENTIAL, 1),
    "optimistic": (SpeculationMode.CACHED, 1),
    "cached": (SpeculationMode.CACHED, 8),
    "auto": (None, 8),
}
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams()
KINDS = (
    (GREEDY, SpeculationChoice()),
    (SAMPLED, SpeculationChoice()),
    (SamplingParams(temperature=0.7, top_k=5, frequency_penalty=0.8), SpeculationChoice()),
    (GREEDY, SpeculationChoice(rule=VerificationRule.REJECTION)),  # of a greedy law it makes the same text
    (SAMPLED, SpeculationChoice(max_tokens=2)),
    (SamplingParams(temperature=0.0, repetition_penalty=1.3), SpeculationChoice()),
    (SAMPLED, SpeculationChoice(preference=SpeculationPreference.OFF)),
    (SamplingParams(temperature=1.6, top_p=0.9), SpeculationChoice()),
)


def mixed(size: int) -> list[SequenceRequest]:
    """Greedy and seeded requests of several lengths; some speculate a little only, some not at all."""
    return [
        request(
            range(1, 3 + 2 * index),
            max_tokens=30 + 2 * index,
            noise_key=500 + index,
            sampling=KINDS[index % len(KINDS)][0],
            speculation=KINDS[index % len(KINDS)][1],
        )
        for index in range(size)
    ]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [LocalEngine(target=TARGET).run(one)[0].token_ids for one in mixed(16)]


class SlowEngine(ScriptedEngine):
    """A forward takes `STEP_S` of the clock, so that speculation pays where the gate decides."""

    clock: ManualClock | None = None

    def forward(self, batch: ForwardBatch) -> Tensor:
        if self.clock is not None:
            self.clock.advance(STEP_S)
        return super().forward(batch)


class Saboteur:
    """Stands between draft and target."""

    def __init__(self, transport: LoopbackTransport, clock: ManualClock, seed: int) -> None:
        self._transport = transport
        self._clock = clock
        self._random = random.Random(seed)
        self._held: list[DraftEvent] = []
        self._paused_until = 0.0
        self.seen = dict.fromkeys(FAULTS, 0)
        transport.tamper = self._tamper

    def before_step(self) -> None:
        """Kill or start the draft, pause it for five seconds, fill the queue to it."""
        transport, fate = self._transport, self._random.random()
        if transport.drafter is None:
            if fate < 0.3:
                transport.start_draft()
        elif fate < 0.04 and self._note("killed"):
            transport.kill_draft()
        elif fate < 0.08 and self._note("paused"):
            self._paused_until = self._clock.now() + PAUSE_S
        transport.paused = self._clock.now() < self._paused_until
        transport.full = self._random.random() < 0.05 and self._note("full")

    def _note(self, what: str) -> bool:
        self.seen[what] += 1
        return True

    def _tamper(self, events: Sequence[DraftEvent]) -> list[DraftEvent]:
        out: list[DraftEvent] = []
        for event in events:
            fate = self._random.random()
            if fate < 0.1 and self._note("late"):
                self._held.append(event)
            elif fate < 0.2 and self._note("twice"):
                out += [event, event]
            elif fate < 0.25 and self._note("lost"):
                continue
            elif fate < 0.35 and self._note("garbage"):
                out.append(self._spoilt(event))
            else:
                out.append(event)
        while self._held and self._random.random() < 0.4:
            out.append(self._held.pop(self._random.randrange(len(self._held))))
        if len(out) > 1 and self._random.random() < 0.3 and self._note("shuffled"):
            self._random.shuffle(out)
        return out

    def _spoilt(self, event: DraftEvent) -> DraftEvent:
        rng = self._random
        if isinstance(event, DraftProposal):
            return replace(event, proposal=self._other(event.proposal), handle=event.handle + rng.randrange(-1, 2))
        if isinstance(event, OutcomeTable):
            return replace(
                event,
                base_len=event.base_len + rng.randrange(-1, 2),
                num_accepted=tuple(max(0, one + rng.randrange(-1, 2)) for one in event.num_accepted),
                next_token_ids=tuple(rng.randrange(-1, 34) for _ in event.next_token_ids),
                token_ids=self._other_ids(event.token_ids),
                laws=self._other_laws(event.laws, len(event.token_ids)),
            )
        others: list[DraftEvent] = [
            NeedResync(handle=rng.randrange(1, 17), have_len=rng.randrange(-1, 60)),
            Evicted(handle=rng.randrange(1, 17), reason=RefusalReason.IDLE),
            Busy(retry_after_s=0.5),
        ]
        return rng.choice(others)

    def _other(self, block: Proposal) -> Proposal:
        """Other tokens, another place, or laws where none belong."""
        moved = block.base_len + self._random.randrange(-1, 2)
        laws = self._other_laws(block.laws, len(block))
        return replace(block, token_ids=self._other_ids(block.token_ids), laws=laws, base_len=moved)

    def _other_ids(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        rng = self._random
        return tuple(rng.randrange(-2, 36) if rng.random() < 0.3 else one for one in token_ids)

    def _other_laws(self, laws: tuple[SparseLaw, ...], num_tokens: int) -> tuple[SparseLaw, ...]:
        return (SparseLaw(token_ids=(1,), probs=(1.0,)),) * num_tokens if self._random.random() < 0.1 else laws


def run(wanted: list[SequenceRequest], gate: GateSettings, seed: int) -> tuple[LocalEngine, Saboteur, list[list[int]]]:
    target = SlowEngine(TARGET)
    engine = LocalEngine(target=target, draft=DRAFT, gate=gate, config=TargetConfig(max_draft_wait_s=0.1))
    target.clock = engine.clock
    assert engine.transport is not None
    saboteur = Saboteur(engine.transport, engine.clock, seed)
    keys = [engine.submit(one) for one in wanted]
    while engine.loop.scheduler.has_work:
        saboteur.before_step()
        engine.loop.step()
    return engine, saboteur, [engine.results[key].token_ids for key in keys]


def gate(mode: str, k: int) -> GateSettings:
    wanted, branches = MODES[mode]
    return GateSettings(
        preference=SpeculationPreference.ON,
        mode=wanted,
        max_num_draft_tokens=k,
        max_branches=branches,
        batch_size_threshold=None,
    )


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("mode", MODES)
def test_the_text_is_that_of_plain_decoding(mode: str, k: int, plain: list[list[int]]) -> None:
    for size in (2 * k - 1, 2 * k):
        engine, _, texts = run(mixed(size), gate(mode, k), seed=100 * k + size)
        assert texts == plain[:size]
        assert engine.loop.scheduler.kv_usage == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_faults_of_every_kind_happen_to_a_draft_that_is_used(mode: str, plain: list[list[int]]) -> None:
    """What the grid above rests on: its faults are real, and between them the draft's blocks are verified."""
    accepted, seen = 0, dict.fromkeys(FAULTS, 0)
    for seed in range(3):
        engine, saboteur, texts = run(mixed(9), gate(mode, 4), seed)
        assert texts == plain[:9]
        accepted += engine.loop.counters.accepted
        for what, count in saboteur.seen.items():
            seen[what] += count
    assert min(seen.values()) > 0, seen
    assert accepted > 30
