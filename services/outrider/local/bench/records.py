"""What was observed of single requests and of whole runs, and the numbers that summarise them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from outrider.core.speculation import SpeculationStats

__all__ = ["Numbers", "Record", "Run", "merged", "percentile", "summarised"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One finished request."""

    started_s: float
    messages: tuple[tuple[float, int], ...]
    """(time, tokens) of every message of tokens, in order; at least one."""
    stats: SpeculationStats | None = None
    """None where the generator does not tell."""

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(tokens for _, tokens in self.messages)

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.messages[0][0] - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """(end to end - TTFT) / (tokens - 1); None for a single token."""
        if self.num_tokens < 2:
            return None
        return (self.messages[-1][0] - self.messages[0][0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latency as a reader sees it: between messages."""
        times = [time for time, _ in self.messages]
        return [after - before for before, after in pairwise(times)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Requests that ran together, the time that they took, and the engine steps meanwhile."""

    seconds: float
    records: tuple[Record, ...]
    steps: int = 0
    step_seconds: dict[str, float] = field(default_factory=dict)
    """Per phase of the step, summed over the steps."""

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(one.num_tokens for one in self.records)

    @property
    def tok_s(self) -> float:
        """Output tokens per second, prefill included."""
        return self.num_tokens / self.seconds


def merged(runs: Sequence[Run]) -> Run:
    """Runs after one another as one."""
    phases = {phase for run in runs for phase in run.step_seconds}
    return Run(
        seconds=sum(run.seconds for run in runs),
        records=tuple(record for run in runs for record in run.records),
        steps=sum(run.steps for run in runs),
        step_seconds={phase: sum(run.step_seconds.get(phase, 0.0) for run in runs) for phase in sorted(phases)},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What is shown of the repeats of one cell in one mode. None: does not apply."""

    tok_s: float
    """Median over the repeats."""
    tok_s_low: float
    tok_s_high: float
    tokens: int
    ttft_p50_s: float
    tpot_p50_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    acceptance_rate: float | None
    """accepted / verified."""
    mean_acceptance_length: float | None
    """1 + accepted / speculative rounds."""
    acceptance_per_position: tuple[float, ...]
    """Share of the verified blocks with that position whose token there was accepted."""


def summarised(repeats: Sequence[Run]) -> Numbers:
    """The numbers of at least one repeat; latencies are pooled over all of them."""
    records = [record for run in repeats for record in run.records]
    rates = [run.tok_s for run in repeats]
    tpots = [tpot for record in records if (tpot := record.tpot_s) is not None]
    gaps = [gap for record in records for gap in record.gaps_s]
    stats = [record.stats for record in records if record.stats is not None]
    verified, accepted = sum(one.verified for one in stats), sum(one.accepted for one in stats)
    rounds = sum(one.speculative_rounds for one in stats)
    return Numbers(
        tok_s=median(rates),
        tok_s_low=min(rates),
        tok_s_high=max(rates),
        tokens=sum(run.num_tokens for run in repeats),
        ttft_p50_s=median(record.ttft_s for record in records),
        tpot_p50_s=median(tpots) if tpots else None,
        itl_p50_s=percentile(gaps, 50) if gaps else None,
        itl_p99_s=percentile(gaps, 99) if gaps else None,
        acceptance_rate=accepted / verified if verified else None,
        mean_acceptance_length=1 + accepted / rounds if rounds else None,
        acceptance_per_position=_per_position(stats),
    )


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed. Raises `ValueError` for none."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _per_position(stats: Sequence[SpeculationStats]) -> tuple[float, ...]:
    longest = max((len(one.verified_per_position) for one in stats), default=0)
    shares = []
    for m in range(longest):
        verified = sum(one.verified_per_position[m] for one in stats if m < len(one.verified_per_position))
        accepted = sum(one.accepted_per_position[m] for one in stats if m < len(one.accepted_per_position))
        shares.append(accepted / verified if verified else 0.0)
    return tuple(shares)
