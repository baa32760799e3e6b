"""One sequence inside the engine: its text, its stream, its times and its plan."""

from dataclasses import dataclass, field

from outrider.core.dispatch import SequenceEnd, SequenceFailure, SpeculationOutcome, Timings
from outrider.core.policy import RoundPlan
from outrider.core.proposal import Proposal
from outrider.core.sequence import Commit, Sequence
from outrider.core.speculation import SpeculationMode, SpeculationReason

__all__ = ["Round", "RunningSequence", "StreamId"]


@dataclass(frozen=True, slots=True)
class StreamId:
    """Where the events of a sequence go."""

    session_id: int
    stream_key: int


@dataclass(slots=True, kw_only=True, eq=False)
class RunningSequence:
    """Engine-side state around a `Sequence`. The scheduler owns it; one thread touches it."""

    sequence: Sequence
    stream: StreamId
    arrived_at: float
    deadline: float | None
    """On the engine's clock."""
    plan: RoundPlan = field(
        default_factory=lambda: RoundPlan(
            mode=SpeculationMode.OFF, num_draft_tokens=0, reason=SpeculationReason.DRAFT_NOT_READY
        )
    )
    ahead: RoundPlan | None = None
    """What the draft shall prepare while the coming step runs; None: nothing."""
    admitted_at: float | None = None
    prefilled_at: float | None = None
    first_token_at: float | None = None
    cached_prompt_tokens: int = 0
    rounds_since_probe: int = 0
    acceptance_hits: float = 0.0
    acceptance_trials: float = 0.0
    """Recent draft tokens accepted, and judged up to the first rejection; both fade."""
    recent_acceptance: float | None = None
    """Exponential mean of accepted / verified over speculative rounds; None before the first."""
    estimated_speedup: float | None = None
    last_mode: SpeculationMode = SpeculationMode.OFF
    last_reason: SpeculationReason = SpeculationReason.DRAFT_NOT_READY
    """Why the latest round did or did not speculate; the very last token of a text does not count."""

    @property
    def handle(self) -> int:
        """The sequence's handle."""
        return self.sequence.handle

    def learn_acceptance(self, accepted: int, trials: int, keep: float) -> None:
        """One more round; `keep` is the share of the past that still counts."""
        self.acceptance_hits = self.acceptance_hits * keep + accepted
        self.acceptance_trials = self.acceptance_trials * keep + trials

    def note(self, reason: SpeculationReason) -> None:
        """Remember why the coming round does or does not speculate."""
        if reason is not SpeculationReason.LAST_TOKEN:
            self.last_reason = reason
            self.last_mode = self.plan.mode if reason is SpeculationReason.ON else SpeculationMode.OFF

    def end(self, now: float, *, failure: SequenceFailure | None = None) -> SequenceEnd:
        """The last event of this sequence."""
        return SequenceEnd(
            stream_key=self.stream.stream_key,
            finish=None if failure else self.sequence.finish,
            failure=failure,
            cached_prompt_tokens=self.cached_prompt_tokens,
            timings=self._timings(now),
            speculation=SpeculationOutcome(
                mode=self.last_mode,
                reason=self.last_reason,
                stats=self.sequence.stats,
                estimated_speedup=self.estimated_speedup,
            ),
        )

    def _timings(self, now: float) -> Timings:
        admitted = self.admitted_at if self.admitted_at is not None else now
        prefilled = self.prefilled_at if self.prefilled_at is not None else now
        first = self.first_token_at if self.first_token_at is not None else now
        return Timings(
            queue_s=admitted - self.arrived_at,
            prefill_s=max(0.0, prefilled - admitted),
            first_token_s=first - self.arrived_at,
            total_s=now - self.arrived_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A finished round of one sequence: what was judged and what was committed."""

    running: RunningSequence
    proposal: Proposal | None
    """The block that the verify step judged, as far as it was used."""
    commit: Commit
