"""Raw counters of one engine since it started. Rates are derived where they are shown."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.dispatch import SpeculationTotals
from outrider.target.proposers import ProposerCounters
from outrider.target.running import Round
from outrider.target.scheduler import Scheduler, StepBatch
from outrider.target.step_times import StepTimer, StepTimes, VerifyTimes

__all__ = ["EngineCounters"]

_RECENT = 0.05


@dataclass(slots=True)
class EngineCounters:
    """Counted by the engine thread; read by it for reports."""

    proposers: ProposerCounters = field(default_factory=ProposerCounters)
    step_times: StepTimes = field(default_factory=StepTimes)
    verify_times: VerifyTimes = field(default_factory=VerifyTimes)
    steps: int = 0
    speculative_steps: int = 0
    rounds: int = 0
    drafted: int = 0
    """Draft tokens that proposers offered for a step, verified or not."""
    verified: int = 0
    accepted: int = 0
    committed: int = 0
    forward_rows: int = 0
    finished: int = 0
    failed: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    verified_per_position: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent per phase of the step, summed."""
    recent_acceptance: float | None = None
    mean_num_draft_tokens: float = 0.0
    """Of the last step, over its speculative rows."""

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / speculative rounds, over the engine's life; None before the first."""
        speculative = self.verified_per_position[0] if self.verified_per_position else 0
        return 1 + self.accepted / speculative if speculative else None

    def count_step(self, batch: StepBatch, rounds: Sequence[Round], phases: StepTimer) -> None:
        """Count a finished step and the time that it took."""
        blocks = [row.proposal for row in batch.rows if row.proposal is not None]
        verified = sum(len(block) for block in blocks)
        accepted = 0
        for one in rounds:
            if one.proposal is not None:
                accepted += one.commit.num_accepted
                self._count_positions(len(one.proposal), one.commit.num_accepted)
            self.committed += len(one.commit.token_ids)
        self.steps += 1
        self.speculative_steps += verified > 0
        self.rounds += len(rounds)
        self.verified += verified
        self.accepted += accepted
        self.forward_rows += batch.num_rows
        self.mean_num_draft_tokens = verified / len(blocks) if blocks else 0.0
        if verified:
            rate, old = accepted / verified, self.recent_acceptance
            self.recent_acceptance = rate if old is None else old + _RECENT * (rate - old)
        # Mixed steps say nothing about either kind.
        if batch.decodes_only and len(blocks) in (0, len(batch.rows)):
            self.step_times.observe(batch_size=len(batch.rows), speculative=verified > 0, seconds=phases.total_s)
            self.verify_times.observe(batch.num_rows, phases.seconds("forward") + phases.seconds("verify"))

    def count_end(self, *, failed: bool) -> None:
        """Count a sequence that left the engine."""
        self.failed += failed
        self.finished += not failed

    def totals(self, scheduler: Scheduler) -> SpeculationTotals:
        """A frozen copy for reports, with what the scheduler counts."""
        return SpeculationTotals(
            steps=self.steps,
            speculative_steps=self.speculative_steps,
            rounds=self.rounds,
            drafted=self.drafted,
            verified=self.verified,
            accepted=self.accepted,
            committed=self.committed,
            draft_messages_sent=self.proposers.messages_sent,
            draft_messages_received=self.proposers.messages_received,
            late=self.proposers.late,
            stale=self.proposers.stale,
            invalid=self.proposers.invalid,
            late_laws=self.proposers.late_laws,
            accepted_per_position=tuple(self.accepted_per_position),
            verified_per_position=tuple(self.verified_per_position),
            forward_rows=self.forward_rows,
            preemptions=scheduler.num_preemptions,
            prefix_cache_queried_tokens=scheduler.prefix_cache.queried_tokens,
            prefix_cache_hit_tokens=scheduler.prefix_cache.hit_tokens,
            finished_sequences=self.finished,
            failed_sequences=self.failed,
            cached_lookups=self.proposers.lookups,
            cached_hits=self.proposers.hits,
            step_seconds=tuple(sorted(self.seconds.items())),
        )

    def _count_positions(self, verified: int, accepted: int) -> None:
        missing = verified - len(self.verified_per_position)
        self.verified_per_position.extend([0] * missing)
        self.accepted_per_position.extend([0] * missing)
        for m in range(verified):
            self.verified_per_position[m] += 1
        for m in range(accepted):
            self.accepted_per_position[m] += 1
