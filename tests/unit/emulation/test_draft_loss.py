"""What a draft that fails costs, in device time: an emulated pair in virtual time, counted step by step."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from outrider.core.link import DraftProposal, LinkDown, LinkEvent, OutcomeTable, TargetEvent
from outrider.core.ports import DraftTransport
from outrider.emulation.harness import EmulationMode, gate_for
from outrider.emulation.pair import EmulatedDraft, EmulatedTarget, PairSettings, emulated_request, greeting
from outrider.emulation.virtual_link import VirtualDraft, VirtualLink
from outrider.emulation.virtual_time import VirtualTime

STEPS = 120
FAULT_AT_S = 0.6
"""In the middle of the run, about 40 steps after its start."""
SPECULATIVE = [EmulationMode.SEQUENTIAL, EmulationMode.CACHED]


class Healthy:
    """A link that may misbehave from `FAULT_AT_S` on; this one does not."""

    def __init__(self, link: VirtualLink, time: VirtualTime) -> None:
        self.link = link
        self.time = time
        self.sent_since = 0
        """Messages to the draft since the fault."""

    @property
    def faulty(self) -> bool:
        return self.time.now() >= FAULT_AT_S

    def send(self, events: Sequence[TargetEvent]) -> bool:
        self.sent_since += self.faulty
        return self.link.send(events)

    def receive(self, timeout_s: float) -> list[LinkEvent]:
        return self.link.receive(timeout_s)

    def close(self) -> None:
        self.link.close()


class Killed(Healthy):
    """The stream breaks."""

    down = False

    def receive(self, timeout_s: float) -> list[LinkEvent]:
        if not self.faulty:
            return super().receive(min(timeout_s, FAULT_AT_S - self.time.now()))
        if not self.down:
            self.down = True
            return [LinkDown(link_id=1, cause="killed")]
        self.time.run(timeout_s)
        return []


class Paused(Healthy):
    """Nothing comes for five seconds, then everything at once."""

    def receive(self, timeout_s: float) -> list[LinkEvent]:
        left = FAULT_AT_S + 5.0 - self.time.now()
        if self.faulty and left > 0:
            self.time.run(min(timeout_s, left))
            return []
        return super().receive(timeout_s)


class Twice(Healthy):
    """Every message comes twice."""

    def receive(self, timeout_s: float) -> list[LinkEvent]:
        return [event for event in super().receive(timeout_s) for _ in range(2)]


class Shuffled(Healthy):
    """Messages overtake each other, by up to a few."""

    def __init__(self, link: VirtualLink, time: VirtualTime) -> None:
        super().__init__(link, time)
        self._random = random.Random(7)
        self._held: list[LinkEvent] = []

    def receive(self, timeout_s: float) -> list[LinkEvent]:
        self._held += super().receive(timeout_s)
        if not self.faulty:
            taken, self._held = self._held, []
            return taken
        self._random.shuffle(self._held)
        keep = self._random.randrange(3)
        taken, self._held = self._held[keep:], self._held[:keep]
        return taken


class Garbage(Healthy):
    """Blocks hold other tokens than were drafted, some of them none at all."""

    def __init__(self, link: VirtualLink, time: VirtualTime) -> None:
        super().__init__(link, time)
        self._random = random.Random(8)

    def receive(self, timeout_s: float) -> list[LinkEvent]:
        return [self._spoilt(event) if self.faulty else event for event in super().receive(timeout_s)]

    def _spoilt(self, event: LinkEvent) -> LinkEvent:
        if isinstance(event, DraftProposal):
            return replace(event, proposal=replace(event.proposal, token_ids=self._other(event.proposal.token_ids)))
        if isinstance(event, OutcomeTable):
            return replace(event, token_ids=self._other(event.token_ids))
        return event

    def _other(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._random.randrange(-3, 140) for _ in token_ids)


class Run:
    """One run: when each step ended, what it had verified by then, and the texts."""

    def __init__(self, mode: EmulationMode, fault: Callable[[VirtualLink, VirtualTime], Healthy], batch: int) -> None:
        settings = PairSettings(batch=batch, max_tokens=17 * (STEPS + 1))
        time = VirtualTime()
        draft = EmulatedDraft(settings, time)
        replica = VirtualDraft(draft.drafter, draft.config, time, hop_s=settings.profile.hop_s)
        self.link = fault(replica.link(greeting(settings)), time)
        transport: DraftTransport = self.link
        target = EmulatedTarget(settings, gate_for(mode, 7), transport, time)
        self.ends: list[float] = []
        self.verified: list[int] = []

        def live() -> None:
            while target.loop.proposers.problem() is not None:
                time.run(1e-3)
                target.loop.proposers.poll()
            for index in range(batch):
                target.submit(index, emulated_request(settings, 1 + index))
            for _ in range(STEPS):
                target.loop.step()
                self.ends.append(time.now())
                self.verified.append(target.loop.counters.verified)

        time.add("draft", replica.live, background=True)
        time.add("target", live)
        time.simulate()
        target.loop.deliver()
        self.texts = list(target.texts.values())

    def durations(self) -> list[tuple[float, float]]:
        """(start, seconds) of every step but the first."""
        return [(before, after - before) for before, after in zip(self.ends, self.ends[1:], strict=False)]


@pytest.fixture(scope="module", params=[1, 4])
def plain(request: pytest.FixtureRequest) -> Run:
    return Run(EmulationMode.PLAIN, Healthy, request.param)


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("fault", [Killed, Paused, Twice, Shuffled, Garbage])
def test_no_fault_changes_a_text(mode: EmulationMode, fault: type[Healthy], plain: Run) -> None:
    run = Run(mode, fault, len(plain.texts))
    for text, expected in zip(run.texts, plain.texts, strict=True):
        length = min(len(text), len(expected))
        assert length > STEPS // 2
        assert text[:length] == expected[:length]


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("fault", [Killed, Paused])
def test_a_draft_that_dies_costs_at_most_one_step(mode: EmulationMode, fault: type[Healthy], plain: Run) -> None:
    """And from then on no draft work is done: the steps are those of plain decoding."""
    run = Run(mode, fault, len(plain.texts))
    plain_s = max(seconds for _, seconds in plain.durations())
    after = [seconds for start, seconds in run.durations() if FAULT_AT_S <= start < FAULT_AT_S + 0.9]
    assert len(after) > 20
    delay_s = sum(seconds - plain_s for seconds in after if seconds > 1.02 * plain_s)
    # A paused draft is waited for as long as three of its round trips would take, once.
    assert delay_s <= (1.0 if fault is Killed else 3.0) * plain_s
    assert sum(seconds > 1.02 * plain_s for seconds in after) <= 2
    last = max(index for index, end in enumerate(run.ends) if end < FAULT_AT_S + 1.0)
    first = next(index for index, end in enumerate(run.ends) if end > FAULT_AT_S + 0.1)
    assert run.verified[last] == run.verified[first], "nothing of the draft's is verified any more"
