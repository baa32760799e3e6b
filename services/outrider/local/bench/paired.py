"""Runs every cell in all of its modes, alternating, so that no mode gets the quieter hour."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from outrider.local.bench.plan import BenchPlan, Cell, Mode, Piece
from outrider.local.bench.records import Run, merged

__all__ = ["CellRuns", "Generate", "Meter", "run_paired"]

Generate = Callable[[Mode, Piece], Awaitable[Run]]
"""Runs one piece in one mode."""
Meter = Callable[[str], None]
"""Told what comes next, once for each of `BenchPlan.num_pieces`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRuns:
    """All repeats of one cell."""

    cell: Cell
    runs: dict[Mode, tuple[Run, ...]]
    """One run per repeat; equal indices ran side by side."""

    def speedup(self, over: Mode, of: Mode) -> tuple[float, ...] | None:
        """Tokens per second of `of` over those of `over`, per repeat; None unless both ran."""
        if over not in self.runs or of not in self.runs:
            return None
        return tuple(mine.tok_s / base.tok_s for mine, base in zip(self.runs[of], self.runs[over], strict=True))


async def run_paired(plan: BenchPlan, generate: Generate, meter: Meter) -> list[CellRuns]:
    """Measure the whole plan. The order of the modes moves on with every piece."""
    done = []
    turn = 0
    for cell in plan.cells():
        modes = plan.modes_of(cell)
        if not modes:
            continue
        repeats: dict[Mode, list[Run]] = {mode: [] for mode in modes}
        for repeat in range(plan.repeats):
            pieces: dict[Mode, list[Run]] = {mode: [] for mode in modes}
            for piece in cell.pieces(repeat):
                for step in range(len(modes)):
                    mode = modes[(turn + step) % len(modes)]
                    meter(f"{cell.prompt_set} · {_load_name(cell)} · {mode.value}")
                    pieces[mode].append(await generate(mode, piece))
                turn += 1
            for mode in modes:
                repeats[mode].append(merged(pieces[mode]))
        done.append(CellRuns(cell=cell, runs={mode: tuple(runs) for mode, runs in repeats.items()}))
    return done


def _load_name(cell: Cell) -> str:
    return f"{cell.request_rate:g} requests/s" if cell.concurrency is None else f"concurrency {cell.concurrency}"
