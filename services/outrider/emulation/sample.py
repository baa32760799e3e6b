"""Counters of a pair at one moment; the difference of two says what happened between them."""

from dataclasses import dataclass

from outrider.emulation.pair import EmulatedDraft, EmulatedTarget

__all__ = ["Sample", "take_sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Raw counters since the start, or of a span of time."""

    seconds: float
    steps: int
    rounds: int
    committed: int
    verified: int
    lookups: int
    """Look-ups in outcome tables."""
    hits: int
    """Look-ups that found the block of the next round, without a message to anybody."""
    draft_busy_s: float

    def since(self, earlier: "Sample") -> "Sample":
        """What has been added."""
        return Sample(
            seconds=self.seconds - earlier.seconds,
            steps=self.steps - earlier.steps,
            rounds=self.rounds - earlier.rounds,
            committed=self.committed - earlier.committed,
            verified=self.verified - earlier.verified,
            lookups=self.lookups - earlier.lookups,
            hits=self.hits - earlier.hits,
            draft_busy_s=self.draft_busy_s - earlier.draft_busy_s,
        )


def take_sample(target: EmulatedTarget, draft: EmulatedDraft | None, now: float) -> Sample:
    """Read the counters; on the thread that runs the engine loop."""
    counters = target.loop.counters
    stats = [one.sequence.stats for one in target.loop.scheduler.all()]
    return Sample(
        seconds=now,
        steps=counters.steps,
        rounds=counters.rounds,
        committed=counters.committed,
        verified=counters.verified,
        lookups=sum(one.cached_lookups for one in stats),
        hits=sum(one.cached_hits for one in stats),
        draft_busy_s=draft.engine.busy_s if draft is not None else 0.0,
    )
