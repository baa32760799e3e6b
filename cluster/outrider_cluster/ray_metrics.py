"""Outrider's metrics on Ray's Prometheus port and dashboard."""

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge, Histogram

from outrider.telemetry.metrics import Metric, MetricKind
from outrider.telemetry.sink import check_value

__all__ = ["RayMetricSink"]


class RayMetricSink:
    """Implements `MetricSink`. Ray's metric is made at the first value. One per process; not thread-safe.

    Counters show from their first 0 on: a series that begins at 1 hides that 1 from every rate and alarm.
    """

    def __init__(self) -> None:
        self._shown: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Increase a counter."""
        check_value(metric, MetricKind.COUNTER, value, labels)
        series = (metric.name, frozenset(labels.items()))
        if value == 0 and series in self._shown:
            return
        if metric.name not in self._counters:
            self._counters[metric.name] = Counter(metric.name, metric.description, metric.labels)
        self._shown.add(series)
        # `inc` does the same, except that it refuses 0.
        self._counters[metric.name]._record(value, dict(labels))

    def observe(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Put a value into a histogram."""
        check_value(metric, MetricKind.HISTOGRAM, value, labels)
        if metric.name not in self._histograms:
            self._histograms[metric.name] = Histogram(
                metric.name, metric.description, list(metric.buckets), metric.labels
            )
        self._histograms[metric.name].observe(value, dict(labels))

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Replace a gauge."""
        check_value(metric, MetricKind.GAUGE, value, labels)
        if metric.name not in self._gauges:
            self._gauges[metric.name] = Gauge(metric.name, metric.description, metric.labels)
        self._gauges[metric.name].set(value, dict(labels))
