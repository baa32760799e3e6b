"""Speed-up against batch size as SVG: one panel for each acceptance, one line for each mode."""

from collections.abc import Sequence
from html import escape
from math import ceil, log2

from outrider.emulation.harness import Row
from outrider.emulation.report import speedups

__all__ = ["speedup_chart"]

_COLOURS = {"plain": "#8a8f98", "sequential": "#d98a29", "cached": "#2f6fd0", "auto": "#2a9d6f"}
_DASHED = ' stroke-dasharray="6 4"'  # for auto, which follows another line where it chooses well
_PANEL_W, _PANEL_H = 330, 220
_LEFT, _TOP, _RIGHT, _BOTTOM = 46, 34, 14, 40
_HEADER, _COLUMNS = 58, 2


def speedup_chart(rows: Sequence[Row], title: str) -> str:
    """The chart as one SVG document; panels without plain rows stay empty, for lack of a measure."""
    ratios = speedups(rows)
    alphas = sorted({row.alpha for row in rows})
    batches = sorted({row.batch for row in rows})
    modes = [mode for mode in _COLOURS if any(row.mode == mode for row in rows)]
    highest = max(2, ceil(max(ratios.values(), default=1.0)))
    width = _COLUMNS * _PANEL_W
    height = _HEADER + -(-len(alphas) // _COLUMNS) * _PANEL_H
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(12, 20, title, size=11, weight=600),
        *_legend(modes),
    ]
    for index, alpha in enumerate(alphas):
        x, y = index % _COLUMNS * _PANEL_W, _HEADER + index // _COLUMNS * _PANEL_H
        parts.append(f'<g transform="translate({x} {y})">')
        parts += _axes(alpha, batches, highest)
        for mode in modes:
            values = [(batch, ratios[alpha, batch, mode]) for batch in batches if (alpha, batch, mode) in ratios]
            parts += _line([(_x(batch, batches), _y(value, highest)) for batch, value in values], mode)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(modes: Sequence[str]) -> list[str]:
    parts = []
    for index, mode in enumerate(modes):
        x = 12 + 92 * index
        parts.append(f'<line x1="{x}" y1="40" x2="{x + 18}" y2="40" {_stroke(mode)}/>')
        parts.append(_text(x + 24, 44, mode))
    return parts


def _axes(alpha: float, batches: Sequence[int], highest: int) -> list[str]:
    right, bottom = _PANEL_W - _RIGHT, _PANEL_H - _BOTTOM
    parts = [_text((_LEFT + right) / 2, _TOP - 12, f"acceptance {alpha:g}", anchor="middle", weight=600)]
    for value in range(highest + 1):
        y = _y(value, highest)
        colour = "#bbb" if value == 1 else "#eee"
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{colour}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value}×", anchor="end"))
    parts += [_text(_x(batch, batches), bottom + 16, str(batch), anchor="middle") for batch in batches]
    parts.append(_text((_LEFT + right) / 2, bottom + 32, "batch size", anchor="middle"))
    return parts


def _stroke(mode: str) -> str:
    return f'stroke="{_COLOURS[mode]}" stroke-width="2"{_DASHED if mode == "auto" else ""}'


def _line(points: Sequence[tuple[float, float]], mode: str) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_COLOURS[mode]}"/>' for x, y in points]
    return [f'<polyline points="{path}" fill="none" {_stroke(mode)}/>', *dots]


def _x(batch: int, batches: Sequence[int]) -> float:
    """Batch sizes on a logarithmic axis; a single one in the middle."""
    low, high = log2(batches[0]), log2(batches[-1])
    share = (log2(batch) - low) / (high - low) if high > low else 0.5
    return _LEFT + 12 + share * (_PANEL_W - _LEFT - _RIGHT - 24)


def _y(value: float, highest: int) -> float:
    return _PANEL_H - _BOTTOM - value / highest * (_PANEL_H - _TOP - _BOTTOM)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )
