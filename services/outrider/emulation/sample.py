"""Counters of a pair at one moment; the difference of two says what happened between them."""

from dataclasses import dataclass

from outrider.core.dispatch import SpeculationTotals

__all__ = ["Sample", "sample_of"]


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


def sample_of(
    totals: SpeculationTotals, *, seconds: float, draft_busy_s: float, committed: int | None = None
) -> Sample:
    """The counters of an engine at `seconds`, with the time that the draft's device has spent by then.

    `committed` counts tokens elsewhere than in the engine.
    """
    return Sample(
        seconds=seconds,
        steps=totals.steps,
        rounds=totals.rounds,
        committed=totals.committed if committed is None else committed,
        verified=totals.verified,
        lookups=totals.cached_lookups,
        hits=totals.cached_hits,
        draft_busy_s=draft_busy_s,
    )
