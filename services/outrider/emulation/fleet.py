"""Engines of a fleet in virtual time: each a real engine loop on an emulated device, in an actor of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from outrider.core.load import EngineLoad
from outrider.core.policy import GateSettings
from outrider.core.ports import DraftTransport
from outrider.emulation.mailbox import VirtualMailbox
from outrider.emulation.pair import EmulatedTarget, PairSettings, emulated_request

__all__ = ["Completion", "EnginePhase", "FleetCounts", "FleetEngine", "StepSeen"]

StepSeen = Callable[[int, bool], None]
"""Told after every step: sequences that were left running, and whether the step verified a block."""


class EnginePhase(Enum):
    """Where an engine stands in the eyes of the fleet."""

    OFF = "off"
    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A sequence that has ended."""

    engine: int
    seed: int
    token_ids: tuple[int, ...]
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCounts:
    """Counters of one engine, or the sum of several."""

    steps: int = 0
    rounds: int = 0
    speculative_rounds: int = 0
    """Rounds that verified a block."""
    committed: int = 0
    """Tokens."""

    def __add__(self, other: "FleetCounts") -> "FleetCounts":
        return FleetCounts(
            steps=self.steps + other.steps,
            rounds=self.rounds + other.rounds,
            speculative_rounds=self.speculative_rounds + other.speculative_rounds,
            committed=self.committed + other.committed,
        )


class FleetEngine:
    """One engine: takes seeds of texts, decodes them, and reports each end."""

    def __init__(
        self,
        index: int,
        settings: PairSettings,
        gate: GateSettings,
        link: DraftTransport,
        completions: VirtualMailbox[Completion],
        on_step: StepSeen,
    ) -> None:
        """`completions` brings its clock along. `live` is the body of the actor."""
        self.index = index
        self.phase = EnginePhase.OFF
        self.ready_at = 0.0
        self.outstanding = 0
        """Sequences that were given to it and have not come back."""
        self._settings = settings
        self._completions = completions
        self._on_step = on_step
        self._inbox: VirtualMailbox[int] = VirtualMailbox(completions.time, hop_s=settings.profile.hop_s)
        self._target = EmulatedTarget(settings, gate, link, completions.time)

    @property
    def load(self) -> EngineLoad:
        """What the autoscaler hears of."""
        return self._target.loop.load()

    @property
    def counts(self) -> "FleetCounts":
        """What it has done since the start."""
        counters = self._target.loop.counters
        verified = counters.verified_per_position
        return FleetCounts(
            steps=counters.steps,
            rounds=counters.rounds,
            speculative_rounds=verified[0] if verified else 0,
            committed=counters.committed,
        )

    def submit(self, seed: int) -> None:
        """Give it text number `seed`. Called by another actor."""
        self.outstanding += 1
        self._inbox.put(seed)

    def live(self) -> None:
        """Step while there is work, wait for some while there is none; for ever."""
        loop = self._target.loop
        while True:
            for seed in self._inbox.take(0.0 if loop.scheduler.has_work else None):
                self._target.submit(seed, emulated_request(self._settings, seed))
            if not loop.scheduler.has_work:
                loop.proposers.poll()
                continue
            before = loop.counters.speculative_steps
            loop.step()
            self._on_step(len(loop.scheduler.running), loop.counters.speculative_steps > before)
            self._report()

    def _report(self) -> None:
        for seed, end in self._target.ends.items():
            token_ids = tuple(self._target.texts.pop(seed))
            self._completions.put(
                Completion(engine=self.index, seed=seed, token_ids=token_ids, failed=end.failure is not None)
            )
        self._target.ends.clear()
