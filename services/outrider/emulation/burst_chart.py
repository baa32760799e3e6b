"""A burst as SVG: sequences per engine, engines and drafts, and the share of rounds that speculate."""

import itertools
from collections.abc import Callable, Sequence
from html import escape

from outrider.emulation.burst import BurstMoment, BurstSettings

__all__ = ["burst_chart"]

_WIDTH, _PANEL_H, _LEFT, _RIGHT, _TOP, _BOTTOM, _HEADER = 720, 170, 52, 16, 30, 22, 34
_BLUE, _ORANGE, _GREEN, _GREY = "#2f6fd0", "#d98a29", "#2a9d6f", "#8a8f98"

_Value = Callable[[BurstMoment], float | None]


def burst_chart(moments: Sequence[BurstMoment], settings: BurstSettings, title: str) -> str:
    """The chart as one SVG document; `moments` in order of time."""
    threshold = settings.gate.batch_size_threshold
    panels = [
        _panel(
            "sequences per engine that serves",
            moments,
            [
                ("in the batch", _BLUE, lambda one: one.running / max(1, one.ready + one.leaving)),
                ("waiting", _ORANGE, lambda one: one.waiting / max(1, one.ready)),
            ],
            rule=None if threshold is None else (threshold, f"gate: off above {threshold}"),
        ),
        _panel(
            "replicas",
            moments,
            [
                ("engines wanted", _GREY, lambda one: one.wanted),
                ("engines that take requests", _BLUE, lambda one: one.ready),
                ("drafts wanted", _GREEN, lambda one: one.drafts),
            ],
        ),
        _panel("share of rounds that speculate", moments, [("", _GREEN, lambda one: one.speculative_share)], top=1.0),
    ]
    height = _HEADER + len(panels) * _PANEL_H + 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#333">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        _text(12, 20, title, weight=600),
    ]
    for index, panel in enumerate(panels):
        parts += [f'<g transform="translate(0 {_HEADER + index * _PANEL_H})">', *panel, "</g>"]
    parts.append(_text(_WIDTH / 2, height - 6, "seconds of device time", anchor="middle"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    name: str,
    moments: Sequence[BurstMoment],
    lines: Sequence[tuple[str, str, _Value]],
    *,
    top: float | None = None,
    rule: tuple[float, str] | None = None,
) -> list[str]:
    values = [value for _, _, of in lines for one in moments if (value := of(one)) is not None]
    highest = top or max([1.0, *values, *([rule[0]] if rule else [])]) * 1.08
    end = max(one.seconds for one in moments) or 1.0
    bottom, right = _PANEL_H - _BOTTOM, _WIDTH - _RIGHT

    def x(seconds: float) -> float:
        return _LEFT + seconds / end * (right - _LEFT)

    def y(value: float) -> float:
        return bottom - value / highest * (bottom - _TOP)

    parts = [_text(_LEFT, _TOP - 10, name, weight=600), *_legend(lines)]
    for value in _ticks(highest):
        parts.append(f'<line x1="{_LEFT}" y1="{y(value):.1f}" x2="{right}" y2="{y(value):.1f}" stroke="#eee"/>')
        parts.append(_text(_LEFT - 6, y(value) + 4, f"{value:g}", anchor="end"))
    parts += [_text(x(value), bottom + 14, f"{value:g}", anchor="middle") for value in _ticks(end)]
    if rule is not None:
        at = y(rule[0])
        parts.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#c33" {_DASHED}/>')
        parts.append(_text(right, at - 4, rule[1], anchor="end"))
    for _, colour, of in lines:
        points = [(x(one.seconds), y(value)) for one in moments if (value := of(one)) is not None]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in _stairs(points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return parts


_DASHED = 'stroke-dasharray="6 4"'


def _legend(lines: Sequence[tuple[str, str, _Value]]) -> list[str]:
    parts, place = [], _LEFT + 230.0
    for label, colour, _ in lines:
        if label:
            line = f'x1="{place}" y1="{_TOP - 14}" x2="{place + 16}" y2="{_TOP - 14}"'
            parts.append(f'<line {line} stroke="{colour}" stroke-width="2"/>')
            parts.append(_text(place + 21, _TOP - 10, label))
            place += 40 + 5.6 * len(label)
    return parts


def _ticks(highest: float) -> list[float]:
    """Three to six round numbers from 0 up to `highest`."""
    step = next(
        size * 10.0**power for power in range(-2, 9) for size in (1, 2, 5) if highest / (size * 10.0**power) <= 6
    )
    return [round(index * step, 6) for index in range(int(highest / step + 1e-9) + 1)]


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A value holds until the next one."""
    stairs = list(points[:1])
    for (_, before), (px, py) in itertools.pairwise(points):
        stairs += [(px, before), (px, py)]
    return stairs


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: int = 400) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
