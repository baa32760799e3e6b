"""Where metric values go: a port, one that drops them and one that keeps them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from outrider.telemetry.metrics import Metric, MetricKind

__all__ = ["HistogramValue", "InMemorySink", "MetricSink", "NullSink", "check_value"]


class MetricSink(Protocol):
    """Takes values. Every call checks itself with `check_value`, never blocks and never waits."""

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Increase a counter by `value`; 0 changes nothing."""
        ...

    def observe(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Put a value into a histogram."""
        ...

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Replace the value of a gauge."""
        ...


def check_value(metric: Metric, kind: MetricKind, value: float, labels: Mapping[str, str]) -> None:
    """Raise `ValueError` naming the metric when the call does not suit its definition."""
    if metric.kind is not kind:
        raise ValueError(f"{metric.name} is a {metric.kind.value}, not a {kind.value}")
    if labels.keys() != set(metric.labels):
        raise ValueError(f"{metric.name} has the labels {sorted(metric.labels)}, not {sorted(labels)}")
    # Written so that NaN fails, too: one of them would spoil a counter for good.
    if kind is not MetricKind.GAUGE and not value >= 0:
        raise ValueError(f"{metric.name}: {value} is below 0")


class NullSink:
    """Keeps nothing and checks nothing."""

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Ignore it."""

    def observe(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Ignore it."""

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Ignore it."""


@dataclass(slots=True, kw_only=True)
class HistogramValue:
    """What a histogram has seen."""

    count: int = 0
    sum: float = 0.0
    bucket_counts: list[int] = field(default_factory=list)
    """One entry per bound, not cumulative, and a last one for everything above."""


@dataclass(slots=True)
class InMemorySink:
    """Keeps one number per metric and label set, in bounded space. For tests.

    Not thread-safe. A label set that was never written reads as 0.
    """

    _numbers: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)
    _histograms: dict[tuple[str, frozenset[tuple[str, str]]], HistogramValue] = field(default_factory=dict)

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Increase a counter."""
        check_value(metric, MetricKind.COUNTER, value, labels)
        key = _key(metric, labels)
        self._numbers[key] = self._numbers.get(key, 0.0) + value

    def observe(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Count a value in its bucket: the first whose bound is not below it."""
        check_value(metric, MetricKind.HISTOGRAM, value, labels)
        empty = HistogramValue(bucket_counts=[0] * (len(metric.buckets) + 1))
        seen = self._histograms.setdefault(_key(metric, labels), empty)
        seen.count += 1
        seen.sum += value
        seen.bucket_counts[sum(bound < value for bound in metric.buckets)] += 1

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Replace a gauge."""
        check_value(metric, MetricKind.GAUGE, value, labels)
        self._numbers[_key(metric, labels)] = value

    def value(self, metric: Metric, labels: Mapping[str, str]) -> float:
        """The counter or gauge under exactly these labels."""
        return self._numbers.get(_key(metric, labels), 0.0)

    def histogram(self, metric: Metric, labels: Mapping[str, str]) -> HistogramValue:
        """The histogram under exactly these labels."""
        return self._histograms.get(_key(metric, labels), HistogramValue())

    def label_sets(self, metric: Metric) -> list[dict[str, str]]:
        """Every label set that was written, in order of first writing."""
        keys = [*self._numbers, *self._histograms]
        return [dict(sorted(labels)) for name, labels in keys if name == metric.name]


def _key(metric: Metric, labels: Mapping[str, str]) -> tuple[str, frozenset[tuple[str, str]]]:
    return metric.name, frozenset(labels.items())
