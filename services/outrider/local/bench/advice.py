"""One plain sentence of advice from what was measured, with the rule that led to it."""

from dataclasses import dataclass
from statistics import geometric_mean, median

from outrider.local.bench.paired import CellRuns
from outrider.local.bench.plan import Mode
from outrider.local.bench.records import Run, summarised
from outrider.local.bench.result import BenchResult

__all__ = ["Advice", "advise"]

_PAYS = 1.05
_LOW_ACCEPTANCE = 0.4
_KEEPS_GOING = 0.75
_DIES_OUT = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do, and why. Both are parts of a sentence."""

    action: str
    rule: str

    def __str__(self) -> str:
        return f"{self.action} (rule: {self.rule})."


def advise(result: BenchResult) -> Advice | None:
    """None when speculation was not compared with plain decoding.

    Rules, the first that applies: a speed-up below 1.05 with acceptance below 0.4 asks for another
    draft, or n-grams; one below 1.05 otherwise says leave it off; above, acceptance at the last
    position of 0.75 or more of that before asks for longer blocks, 0.35 or less for shorter ones.
    """
    cells = [one for one in result.cells if one.speedup(Mode.PLAIN, Mode.SPECULATIVE) is not None]
    if not cells:
        return None
    speedup = geometric_mean([_speedup(one) for one in cells])
    numbers = summarised([run for one in cells for run in one.runs[Mode.SPECULATIVE]])
    rate = numbers.acceptance_rate
    if rate is None:
        return Advice(
            action="Leave speculation off as it stands: no draft token was verified",
            rule="without a verified token nothing can be gained",
        )
    measured = f"measured speed-up {speedup:.2f}x at acceptance {rate:.2f}"
    if speedup < _PAYS and rate < _LOW_ACCEPTANCE:
        other = "another draft" if result.draft == "ngram" else "another draft, or n-grams where answers quote"
        return Advice(
            action=f"Leave speculation off with this draft and try {other}: {measured}",
            rule=f"speed-up below {_PAYS} and acceptance below {_LOW_ACCEPTANCE}",
        )
    if speedup < _PAYS:
        return Advice(
            action=f"Leave speculation off, or take a cheaper draft: {measured}",
            rule=f"speed-up below {_PAYS} although acceptance is at least {_LOW_ACCEPTANCE}",
        )
    return _enable(cells, numbers.acceptance_per_position, measured)


def _enable(cells: list[CellRuns], positions: tuple[float, ...], measured: str) -> Advice:
    slow = [one for one in cells if _speedup(one) < _PAYS]
    where = ", ".join(sorted({f"{one.cell.prompt_set} at {_streams(one)}" for one in slow}))
    action = f"Enable speculation{f', except for {where}' if where else ''}: {measured}"
    if len(positions) > 1 and positions[-2] > 0:
        # Blocks cut short near the end of an output can make the later share the larger one.
        going_on = min(1.0, positions[-1] / positions[-2])
        if going_on >= _KEEPS_GOING:
            return Advice(
                action=f"{action}; try a longer K than {len(positions)}",
                rule=f"of the blocks accepted up to position {len(positions) - 1}, {going_on:.2f} go on, "
                f"at least {_KEEPS_GOING}",
            )
        if going_on <= _DIES_OUT:
            return Advice(
                action=f"{action}; try a shorter K than {len(positions)}",
                rule=f"of the blocks accepted up to position {len(positions) - 1}, {going_on:.2f} go on, "
                f"at most {_DIES_OUT}",
            )
    return Advice(action=f"{action}; K = {len(positions)} fits", rule=f"speed-up of at least {_PAYS}")


def _speedup(cell: CellRuns) -> float:
    pairs: list[tuple[Run, Run]] = list(zip(cell.runs[Mode.SPECULATIVE], cell.runs[Mode.PLAIN], strict=True))
    return median(speculative.tok_s / plain.tok_s for speculative, plain in pairs)


def _streams(cell: CellRuns) -> str:
    if cell.cell.concurrency is None:
        return f"{cell.cell.request_rate:g} requests/s"
    return f"concurrency {cell.cell.concurrency}"
