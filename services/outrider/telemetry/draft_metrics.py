"""Turns successive reports of one draft into counter increments and gauges."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.telemetry import metrics
from outrider.telemetry.metrics import DRAFT_LABELS, DRAFT_TOTALS
from outrider.telemetry.sink import MetricSink

__all__ = ["DraftMetrics", "DraftReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftReport:
    """The state of one draft."""

    ready: bool = False
    """Whether it serves."""
    links: int = 0
    sequences: int = 0
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1."""
    step_s: float = 0.0
    """Recent mean of a draft step; 0 before the first."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """Raw counters since the draft started, by the names in `DRAFT_TOTALS`; others are passed over."""


class DraftMetrics:
    """Publishes one draft, or the drafts that follow one another in one replica.

    Called about once a second, off the drafting thread. Not thread-safe.
    """

    def __init__(self, sink: MetricSink, labels: Mapping[str, str]) -> None:
        """`labels`: a value for each of `DRAFT_LABELS`. Raises `ValueError` otherwise."""
        if labels.keys() != set(DRAFT_LABELS):
            raise ValueError(f"labels: {sorted(labels)} are not {sorted(DRAFT_LABELS)}")
        self._sink = sink
        self._labels = dict(labels)
        self._published: dict[str, int] = {}

    def publish(self, report: DraftReport) -> None:
        """Publish what has changed since the last call. A total that went down counts from 0 again."""
        for metric, value in (
            (metrics.DRAFT_READY, report.ready),
            (metrics.DRAFT_LINKS, report.links),
            (metrics.DRAFT_SEQUENCES, report.sequences),
            (metrics.DRAFT_KV_USAGE, report.kv_usage),
            (metrics.DRAFT_STEP_SECONDS, report.step_s),
        ):
            self._sink.set(metric, float(value), self._labels)
        for name, metric in DRAFT_TOTALS.items():
            total, before = report.totals.get(name, 0), self._published.get(name, 0)
            self._sink.add(metric, total - before if total >= before else total, self._labels)
            self._published[name] = total
