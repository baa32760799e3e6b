"""A burst of load on a fleet in virtual time: gate, dispatch, autoscaling and draining, hours in seconds.

Everything that decides is the real code: the engine loop with its gate, the drafter, the router's
dispatch policy, the demand and the rule of the autoscaler. Devices, network and the starting of a replica
are emulated.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from outrider.core.errors import ConfigError
from outrider.core.policy import GateSettings
from outrider.core.scaling import follow
from outrider.emulation.autoscaler import Autoscaler, ScalingSettings
from outrider.emulation.fleet import Completion, EnginePhase, FleetCounts, FleetEngine
from outrider.emulation.mailbox import VirtualMailbox
from outrider.emulation.pair import VOCAB_SIZE, EmulatedDraft, PairProfile, PairSettings, greeting
from outrider.emulation.virtual_link import VirtualDraft
from outrider.emulation.virtual_time import VirtualTime
from outrider.engine.emulated.device import slowed
from outrider.engine.emulated.text import SyntheticText, TextSettings, header_tokens
from outrider.router.dispatch import Candidate, Dispatcher
from outrider.target.config import TargetConfig

__all__ = ["BurstMoment", "BurstResult", "BurstSettings", "Phase", "run_burst"]

_OPEN_TEXT = 128
"""Output tokens of a request."""
_PROMPT_LEN = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """So many streams for so long; each runs one request after another."""

    seconds: float
    streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstSettings:
    """The load, and the fleet that it meets. Raises `ConfigError` naming the field."""

    phases: tuple[Phase, ...] = (
        Phase(seconds=60, streams=6),
        Phase(seconds=240, streams=100),
        Phase(seconds=300, streams=6),
    )
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    gate: GateSettings = field(
        default_factory=lambda: GateSettings(mode=None, batch_size_threshold=32, batch_size_hysteresis=2)
    )
    max_num_seqs: int = 64
    """Seats of one engine."""
    acceptance: float = 0.8
    slowdown: float = 10.0
    """Of both devices: fewer steps to simulate in the same time."""

    def __post_init__(self) -> None:
        if not self.phases or any(not 0 < one.seconds < math.inf or one.streams < 0 for one in self.phases):
            raise ConfigError(
                "phases: at least one is needed, each with a finite time above 0 and no fewer than 0 streams"
            )
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs: {self.max_num_seqs} is below 1")

    def pair(self, engines: int = 1) -> PairSettings:
        """One engine, or the draft of several."""
        profile = PairProfile()
        return PairSettings(
            profile=replace(
                profile,
                target=slowed(profile.target, self.slowdown),
                draft=slowed(profile.draft, self.slowdown),
            ),
            text=TextSettings(acceptance=self.acceptance),
            batch=self.max_num_seqs * engines,
            prompt_len=_PROMPT_LEN,
            max_tokens=_OPEN_TEXT,
            # What a wait is measured against is slower as well.
            max_draft_wait_s=self.slowdown * TargetConfig().max_draft_wait_s,
        )

    def streams_at(self, moment: float) -> int:
        """Streams that shall be open then; 0 behind the last phase."""
        for phase in self.phases:
            if moment < phase.seconds:
                return phase.streams
            moment -= phase.seconds
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstMoment:
    """The fleet at one moment, and what it did since the moment before."""

    seconds: float
    streams: int
    """Requests under way."""
    running: int
    """Sequences in batches, over all engines."""
    waiting: int
    ready: int
    """Engines that take requests."""
    starting: int
    leaving: int
    wanted: int
    """Engines that the autoscaler asks for."""
    drafts: int
    """Draft replicas that the ratio asks for."""
    speculative_share: float | None
    """Share of the rounds that verified a block; None without rounds."""
    tok_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstResult:
    """What happened. Emulated, all of it."""

    moments: tuple[BurstMoment, ...]
    requests: int
    failed: int
    wrong: int
    """Texts that are not what the request would have given alone."""
    late_gate_steps: int
    """Steps that speculated although they left more sequences running than the threshold allows."""
    steps: int


def run_burst(settings: BurstSettings) -> BurstResult:
    """Run it. Raises what any of the actors raises."""
    return _Burst(settings).run()


class _Burst:
    """The fleet, and the actor that plays clients, router and autoscaler."""

    def __init__(self, settings: BurstSettings) -> None:
        self._settings = settings
        self._time = VirtualTime()
        self._completions: VirtualMailbox[Completion] = VirtualMailbox(self._time, hop_s=PairProfile().hop_s)
        self._engines = list(self._build())
        self._dispatcher = Dispatcher()
        self._autoscaler = Autoscaler(settings.scaling)
        self._moments: list[BurstMoment] = []
        self._text = SyntheticText(settings.pair().text, VOCAB_SIZE)
        self._next_seed = 0
        self._counted = FleetCounts()
        """At the last look."""
        self._ended = self._failed = self._wrong = self._late_gate_steps = 0
        for engine in self._engines[: settings.scaling.min_replicas]:
            engine.phase = EnginePhase.READY

    def run(self) -> BurstResult:
        for engine in self._engines:
            self._time.add(f"engine {engine.index}", engine.live, background=True)
        self._time.add("clients", self._live)
        self._time.simulate()
        return BurstResult(
            moments=tuple(self._moments),
            requests=self._ended,
            failed=self._failed,
            wrong=self._wrong,
            late_gate_steps=self._late_gate_steps,
            steps=self._counts().steps,
        )

    def _build(self) -> Iterator[FleetEngine]:
        settings, share = self._settings, self._settings.scaling.targets_per_draft
        draft: VirtualDraft | None = None
        for index in range(settings.scaling.max_replicas):
            if draft is None or index % share == 0:
                made = EmulatedDraft(settings.pair(share), self._time)
                draft = VirtualDraft(made.drafter, made.config, self._time, hop_s=settings.pair().profile.hop_s)
                self._time.add(f"draft {index // share}", draft.live, background=True)
            link = draft.link(greeting(settings.pair(), f"engine-{index}"))
            yield FleetEngine(index, settings.pair(), settings.gate, link, self._completions, self._on_step)

    def _on_step(self, running: int, speculated: bool) -> None:
        threshold = self._settings.gate.batch_size_threshold
        self._late_gate_steps += speculated and threshold is not None and running > threshold

    def _live(self) -> None:
        next_look = 0.0
        end = sum(phase.seconds for phase in self._settings.phases)
        while self._time.now() < end or self._under_way:
            for one in self._completions.take(max(0.0, next_look - self._time.now())):
                self._take_back(one)
            if self._time.now() >= next_look:
                next_look += self._settings.scaling.measure_interval_s
                self._look()
            while self._under_way < self._settings.streams_at(self._time.now()):
                self._launch()

    @property
    def _under_way(self) -> int:
        return self._next_seed - self._ended

    def _launch(self) -> None:
        prompt = header_tokens(self._next_seed, VOCAB_SIZE)
        loads = [
            Candidate(replica_id=str(one.index), ready=one.phase is EnginePhase.READY, outstanding=one.outstanding)
            for one in self._engines
        ]
        self._engines[int(self._dispatcher.choose(prompt, loads))].submit(self._next_seed)
        self._next_seed += 1

    def _take_back(self, one: Completion) -> None:
        engine = self._engines[one.engine]
        engine.outstanding -= 1
        if engine.phase is EnginePhase.LEAVING and not engine.outstanding:
            engine.phase = EnginePhase.OFF
        self._ended += 1
        header = header_tokens(one.seed, VOCAB_SIZE)
        right = tuple(self._text.token(header, _PROMPT_LEN + position) for position in range(_OPEN_TEXT))
        self._failed += one.failed
        self._wrong += not one.failed and one.token_ids != right

    def _look(self) -> None:
        """The autoscaler's turn, and a line of the record."""
        now, scaling = self._time.now(), self._settings.scaling
        for engine in self._of(EnginePhase.STARTING):
            if now >= engine.ready_at:
                engine.phase = EnginePhase.READY
        demand = sum(scaling.targets.demand(one.load) for one in self._of(EnginePhase.READY))
        self._steer(now, self._autoscaler.observe(now, demand))
        self._record(now)

    def _steer(self, now: float, wanted: int) -> None:
        serving = self._of(EnginePhase.STARTING) + self._of(EnginePhase.READY)
        for engine in self._of(EnginePhase.OFF)[: max(0, wanted - len(serving))]:
            engine.phase, engine.ready_at = EnginePhase.STARTING, now + self._settings.scaling.start_s
        # First those that serve nobody yet, then those with the least to finish.
        serving.sort(key=lambda one: (one.phase is EnginePhase.READY, one.outstanding))
        for engine in serving[: max(0, len(serving) - wanted)]:
            engine.phase = EnginePhase.LEAVING if engine.outstanding else EnginePhase.OFF

    def _record(self, now: float) -> None:
        loads = [one.load for one in self._engines]
        before, self._counted = self._counted, self._counts()
        new_rounds = self._counted.rounds - before.rounds
        new_speculative = self._counted.speculative_rounds - before.speculative_rounds
        ready = len(self._of(EnginePhase.READY))
        self._moments.append(
            BurstMoment(
                seconds=now,
                streams=self._under_way,
                running=sum(one.running for one in loads),
                waiting=sum(one.waiting for one in loads),
                ready=ready,
                starting=len(self._of(EnginePhase.STARTING)),
                leaving=len(self._of(EnginePhase.LEAVING)),
                wanted=self._autoscaler.wanted,
                drafts=follow(
                    max(self._autoscaler.wanted, ready), per_replica=self._settings.scaling.targets_per_draft
                ),
                speculative_share=new_speculative / new_rounds if new_rounds else None,
                tok_s=(self._counted.committed - before.committed) / self._settings.scaling.measure_interval_s,
            )
        )

    def _counts(self) -> FleetCounts:
        return sum((one.counts for one in self._engines), start=FleetCounts())

    def _of(self, phase: EnginePhase) -> list[FleetEngine]:
        return [one for one in self._engines if one.phase is phase]
