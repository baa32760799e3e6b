"""A sweep as JSON. The keys are read by scripts and stay."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outrider.emulation.harness import Row
from outrider.emulation.sweep import Sweep

__all__ = ["PUBLISHED_SPEEDUPS", "report_as_json", "speedups"]

PUBLISHED_SPEEDUPS = {0.78: 2.44, 0.65: 2.03, 0.41: 1.09}
"""By acceptance, at batch 1 and K = 5: what sequential systems have reported on real hardware."""


def report_as_json(sweep: Sweep, rows: Sequence[Row], *, clock: str) -> dict[str, Any]:
    """Everything that a reader needs to run the sweep again, and its rows."""
    profile = sweep.profile
    return {
        "emulated": True,
        "profile": {
            "name": profile.name,
            "clock": clock,
            "hop_ms": 1e3 * profile.hop_s,
            "verify_ms": 1e3 * profile.target.step_s(rows=1 + sweep.k),
            "draft_step_ms": 1e3 * profile.draft.step_s(rows=1),
            "k": sweep.k,
            "branches": sweep.branches,
            "target": asdict(profile.target),
            "draft": asdict(profile.draft),
            "text": asdict(sweep.text),
        },
        "rows": [asdict(row) for row in rows],
    }


def speedups(rows: Sequence[Row]) -> dict[tuple[float, int, str], float]:
    """Tokens per second over plain decoding, by (alpha, batch, mode), wherever the sweep has plain rows."""
    plain = {(row.alpha, row.batch): row.tok_s_stream for row in rows if row.mode == "plain"}
    return {
        (row.alpha, row.batch, row.mode): row.tok_s_stream / plain[row.alpha, row.batch]
        for row in rows
        if (row.alpha, row.batch) in plain
    }
