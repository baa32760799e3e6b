"""Results of benchmarks that nobody ran, with numbers that one can compute by hand."""

from outrider.core.speculation import SpeculationStats
from outrider.local.bench.paired import CellRuns
from outrider.local.bench.plan import Cell, Mode
from outrider.local.bench.prompts import Prompt
from outrider.local.bench.records import Record, Run


def stats(verified: list[int], accepted: list[int], *, rounds: int | None = None) -> SpeculationStats:
    """Counters per draft position."""
    return SpeculationStats(
        rounds=rounds or verified[0],
        speculative_rounds=verified[0],
        verified=sum(verified),
        accepted=sum(accepted),
        verified_per_position=verified,
        accepted_per_position=accepted,
    )


def run(tok_s: float, speculation: SpeculationStats | None = None, *, steps: int = 0) -> Run:
    """One request of ten tokens: one message each, after one second; the run took 10 / tok_s seconds."""
    record = Record(started_s=0.0, messages=tuple((1.0 + 0.1 * i, 1) for i in range(10)), stats=speculation)
    return Run(seconds=10 / tok_s, records=(record,), steps=steps, step_seconds={"plan": 0.5 * steps})


def cell(
    runs: dict[Mode, list[Run]], *, name: str = "code", concurrency: int | None = 1, request_rate: float | None = None
) -> CellRuns:
    """All repeats of one cell."""
    load = Cell(prompt_set=name, prompts=(Prompt(text="x"),), concurrency=concurrency, request_rate=request_rate)
    return CellRuns(cell=load, runs={mode: tuple(each) for mode, each in runs.items()})
