"""What the demo has measured: as a table for people and as JSON for scripts, whose keys stay."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from outrider_cluster.cli.measured import Measurement

__all__ = ["DemoRow", "as_json", "as_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """One prompt with speculation on and off, and the draft alone."""

    name: str
    """Short, for the table."""
    prompt: str
    on: Measurement
    off: Measurement
    draft_alone_tokens_per_s: float | None

    @property
    def texts_equal(self) -> bool:
        """Whether speculation changed nothing."""
        return self.on.text == self.off.text


def as_json(rows: Sequence[DemoRow]) -> dict[str, Any]:
    """All rows, and whether every pair of texts is equal."""
    return {
        "texts_equal": all(row.texts_equal for row in rows),
        "rows": [
            {
                "prompt": row.prompt,
                "tokens": row.on.num_tokens,
                "tok_s_on": row.on.tokens_per_s,
                "tok_s_off": row.off.tokens_per_s,
                "tok_s_draft_alone": row.draft_alone_tokens_per_s,
                "acceptance_rate": row.on.stats.acceptance_rate,
                "mean_acceptance_length": row.on.stats.mean_acceptance_length,
            }
            for row in rows
        ],
    }


def as_table(rows: Sequence[DemoRow]) -> Table:
    """One line per prompt, within 80 columns."""
    table = Table(title="speculation on and off, tokens per second", box=SIMPLE, pad_edge=False)
    table.add_column("prompt", no_wrap=True)
    for heading in ("tokens", "on", "off", "draft alone", "accepted", "a round", "equal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        stats = row.on.stats
        table.add_row(
            row.name,
            str(row.on.num_tokens),
            _number(row.on.tokens_per_s),
            _number(row.off.tokens_per_s),
            _number(row.draft_alone_tokens_per_s),
            "–" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.0%}",
            "–" if stats.mean_acceptance_length is None else f"{stats.mean_acceptance_length:.2f}",
            "yes" if row.texts_equal else "NO",
        )
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
