"""A sweep as a table for people."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Table

from outrider.emulation.harness import Row
from outrider.emulation.report import PUBLISHED_SPEEDUPS, speedups
from outrider.emulation.sweep import Sweep

__all__ = ["sweep_table", "sweep_title"]

_PUBLISHED_K = 5
_HEADINGS = (
    *("α", "batch", "mode", "tok/s", "total", "× plain", "bound", "of it"),
    *("tok/round", "hit rate", "hits", "K", "draft busy"),
)
_CAPTION = "tok/s and bound: of each stream. hits: rounds whose block came without a round trip."


def sweep_title(sweep: Sweep, clock: str) -> str:
    """What a reader must know before any figure."""
    return f"Emulated: {sweep.profile.name}, K {sweep.k}, {clock} clock"


def sweep_table(sweep: Sweep, rows: Sequence[Row], clock: str) -> Table:
    """One line a run; the published speed-up beside ours where there is one for the same K."""
    table = Table(title=sweep_title(sweep, clock), box=SIMPLE, collapse_padding=True, pad_edge=False, caption=_CAPTION)
    ratios = speedups(rows)
    shows_published = sweep.k == _PUBLISHED_K and any(_published(row) for row in rows)
    for heading in (*_HEADINGS, *(["published"] if shows_published else [])):
        table.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=True)
    for row in rows:
        ratio = ratios.get((row.alpha, row.batch, row.mode))
        cells = [
            f"{row.alpha:g}",
            str(row.batch),
            row.mode,
            f"{row.tok_s_stream:.1f}",
            f"{row.tok_s_total:.0f}",
            "" if ratio is None else f"{ratio:.2f}",
            f"{row.bound_tok_s_stream:.1f}",
            f"{row.bound_ratio:.0%}",
            f"{row.mean_acceptance_length:.2f}",
            "" if row.hit_rate is None else f"{row.hit_rate:.2f}",
            str(row.zero_round_trip_hits),
            f"{row.k_mean:.1f}",
            f"{row.draft_utilisation:.0%}",
        ]
        table.add_row(*cells, *([_published(row)] if shows_published else []))
    return table


def _published(row: Row) -> str:
    figure = PUBLISHED_SPEEDUPS.get(row.alpha) if row.batch == 1 and row.mode == "sequential" else None
    return "" if figure is None else f"{figure:.2f}"
