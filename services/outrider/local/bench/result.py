"""Everything that one benchmark measured, and the ratios that follow."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import geometric_mean, median

from outrider.local.bench.accounting import StepCost
from outrider.local.bench.off_cost import OffCost
from outrider.local.bench.paired import CellRuns
from outrider.local.bench.plan import Mode
from outrider.local.bench.records import merged
from outrider.local.bench.widths import WidthShares

__all__ = ["PHASES", "BenchResult"]

PHASES = ("plan", "wait", "forward", "verify", "commit", "emit")
"""Of a step, in order."""
_MANY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Raw results of one run. What was not measured is empty or None."""

    dtype: str | None
    """None, as `threads`, where a deployment was measured, which does not tell."""
    threads: int | None
    draft: str | None = None
    num_draft_tokens: int | None = None
    cells: tuple[CellRuns, ...] = ()
    widths: WidthShares | None = None
    off_cost: OffCost | None = None
    accounting: tuple[StepCost, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader has to know about the numbers, a sentence each."""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def ratios(self) -> dict[str, float]:
        """By the names of the JSON report; a ratio that was not measured is absent.

        Speeds are compared per prompt set and repeat, at one stream at a time where that was run;
        of the repeats the median counts, of the prompt sets the geometric mean.
        """
        found: dict[str, float | None] = {
            "speculative_over_plain": self._speedup(Mode.PLAIN, Mode.SPECULATIVE),
            "plain_over_hf_plain": self._speedup(Mode.HF_PLAIN, Mode.PLAIN),
            "speculative_over_hf_assisted": self._speedup(Mode.HF_ASSISTED, Mode.SPECULATIVE),
            "concurrent16_over_1": self._scaling(),
            "off_over_unconfigured": self.off_cost.ratio if self.off_cost is not None else None,
            "width1_share_of_bound": self.widths.share(1) if self.widths is not None else None,
            "width6_share_of_bound": self.widths.share(6) if self.widths is not None else None,
        }
        return {name: ratio for name, ratio in found.items() if ratio is not None}

    @property
    def step_ms(self) -> dict[str, float]:
        """Mean milliseconds of each phase of a step.

        From the scripted engine: CPU time, speculating, greedy, one sequence. Else wall time of the steps of
        speculative runs, or of plain ones where nothing speculated. Empty if nothing was measured.
        """
        if self.accounting:
            shown = min(self.accounting, key=lambda one: (not one.speculates, one.num_seqs, one.temperature))
            return {phase: shown.phase_ms.get(phase, 0.0) for phase in PHASES}
        for mode in (Mode.SPECULATIVE, Mode.PLAIN):
            run = merged([run for one in self.cells for run in one.runs.get(mode, ())])
            if run.steps:
                return {phase: 1e3 * run.step_seconds.get(phase, 0.0) / run.steps for phase in PHASES}
        return {}

    def _speedup(self, over: Mode, of: Mode) -> float | None:
        """At the lowest number of streams."""
        cells = [one for one in self.cells if one.speedup(over, of) is not None]
        fewest = min((one.cell.concurrency or 0 for one in cells), default=None)
        chosen = [one for one in cells if (one.cell.concurrency or 0) == fewest]
        return _mean(median(speedup) for one in chosen if (speedup := one.speedup(over, of)) is not None)

    def _scaling(self) -> float | None:
        """Plain tokens per second at 16 streams over those at 1."""
        rates = {
            (one.cell.prompt_set, one.cell.concurrency): median(run.tok_s for run in one.runs[Mode.PLAIN])
            for one in self.cells
            if Mode.PLAIN in one.runs
        }
        names = dict.fromkeys(name for name, _ in rates)
        return _mean(
            rates[name, _MANY] / rates[name, 1] for name in names if (name, 1) in rates and (name, _MANY) in rates
        )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return geometric_mean(found) if found else None
