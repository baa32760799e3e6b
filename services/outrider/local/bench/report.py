"""A benchmark as JSON. The keys outside `details` are read by scripts and stay."""

from dataclasses import asdict
from statistics import median
from typing import Any

from outrider.local.bench.advice import advise
from outrider.local.bench.paired import CellRuns
from outrider.local.bench.plan import Mode
from outrider.local.bench.records import summarised
from outrider.local.bench.result import BenchResult

__all__ = ["PAIRS", "report_as_json"]

PAIRS = (
    (Mode.PLAIN, Mode.SPECULATIVE),
    (Mode.HF_PLAIN, Mode.PLAIN),
    (Mode.HF_ASSISTED, Mode.SPECULATIVE),
)
"""(over, of): the speed-ups that are reported per cell."""


def report_as_json(result: BenchResult) -> dict[str, Any]:
    """`rows`, `ratios` and `step_ms` have a fixed shape; everything else stands in `details`."""
    return {
        "dtype": result.dtype,
        "threads": result.threads,
        "rows": [_row(one, mode) for one in result.cells for mode in one.runs],
        "ratios": result.ratios,
        "step_ms": result.step_ms,
        "details": _details(result),
    }


def _row(one: CellRuns, mode: Mode) -> dict[str, Any]:
    numbers = summarised(one.runs[mode])
    return {
        "prompt_set": one.cell.prompt_set,
        "concurrency": one.cell.concurrency,
        "mode": mode.value,
        "tok_s": numbers.tok_s,
        "ttft_p50_s": numbers.ttft_p50_s,
        "tpot_p50_s": numbers.tpot_p50_s,
        "itl_p99_s": numbers.itl_p99_s,
        "acceptance_rate": numbers.acceptance_rate,
        "mean_acceptance_length": numbers.mean_acceptance_length,
    }


def _details(result: BenchResult) -> dict[str, Any]:
    advice = advise(result)
    return {
        "draft": result.draft,
        "num_draft_tokens": result.num_draft_tokens,
        "rows": [_row_details(one, mode) for one in result.cells for mode in one.runs],
        "speedups": [_speedup(one, over, of) for one in result.cells for over, of in PAIRS if _ran(one, over, of)],
        "accounting_cpu_ms": [{**asdict(one), "overhead_ms": one.overhead_ms} for one in result.accounting],
        "off_cost": None if result.off_cost is None else asdict(result.off_cost),
        "widths": None if result.widths is None else asdict(result.widths),
        "advice": None if advice is None else str(advice),
        "notes": list(result.notes),
        "versions": result.versions,
    }


def _row_details(one: CellRuns, mode: Mode) -> dict[str, Any]:
    numbers = summarised(one.runs[mode])
    return {
        "prompt_set": one.cell.prompt_set,
        "concurrency": one.cell.concurrency,
        "request_rate": one.cell.request_rate,
        "mode": mode.value,
        "prompts": len(one.cell.prompts),
        "repeats": len(one.runs[mode]),
        "tokens": numbers.tokens,
        "tok_s_low": numbers.tok_s_low,
        "tok_s_high": numbers.tok_s_high,
        "itl_p50_s": numbers.itl_p50_s,
        "acceptance_per_position": list(numbers.acceptance_per_position),
    }


def _ran(one: CellRuns, over: Mode, of: Mode) -> bool:
    return over in one.runs and of in one.runs


def _speedup(one: CellRuns, over: Mode, of: Mode) -> dict[str, Any]:
    per_repeat = one.speedup(over, of) or ()
    return {
        "prompt_set": one.cell.prompt_set,
        "concurrency": one.cell.concurrency,
        "over": over.value,
        "of": of.value,
        "median": median(per_repeat),
        "low": min(per_repeat),
        "high": max(per_repeat),
    }
