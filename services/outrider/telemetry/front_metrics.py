"""What the front of an engine counts: it lives on when the ranks, and their own counters, do not."""

from collections.abc import Mapping

from outrider.telemetry import metrics
from outrider.telemetry.metrics import ENGINE_LABELS
from outrider.telemetry.sink import MetricSink

__all__ = ["FrontMetrics"]


class FrontMetrics:
    """One engine over all its incarnations. Not thread-safe."""

    def __init__(self, sink: MetricSink, labels: Mapping[str, str]) -> None:
        """`labels`: a value for each of `ENGINE_LABELS`. Raises `ValueError` otherwise."""
        if labels.keys() != set(ENGINE_LABELS):
            raise ValueError(f"labels: {sorted(labels)} are not {sorted(ENGINE_LABELS)}")
        self._sink = sink
        self._labels = dict(labels)
        for metric in (metrics.ENGINE_STARTS, metrics.ENGINE_FAILURES):
            sink.add(metric, 0, self._labels)
        self._set_ready(False)

    def starting(self) -> None:
        """The ranks of a new incarnation are being started."""
        self._sink.add(metrics.ENGINE_STARTS, 1, self._labels)
        self._set_ready(False)

    def ready(self) -> None:
        """The engine serves."""
        self._set_ready(True)

    def failed(self) -> None:
        """The incarnation is lost."""
        self._sink.add(metrics.ENGINE_FAILURES, 1, self._labels)
        self._set_ready(False)

    def repeat(self) -> None:
        """Say again whether the engine serves: a gauge that nobody sets for a while vanishes from Ray's port."""
        self._set_ready(self._ready)

    def closed(self) -> None:
        """The replica leaves."""
        self._set_ready(False)

    def _set_ready(self, value: bool) -> None:
        self._ready = value
        self._sink.set(metrics.READY, float(value), self._labels)
