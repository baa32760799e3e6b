"""What Ray's metrics are told; no cluster runs."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from ray.util.metrics import Counter

from outrider.telemetry import metrics
from outrider.telemetry.sink import MetricSink
from outrider_cluster import ray_metrics
from outrider_cluster.ray_metrics import RayMetricSink

ENGINE = {"model_name": "m", "engine": "e0"}
REQUEST = {"model_name": "m", "router": "r0", "traffic_class": "other"}


class Recorded:
    """Stands for Ray's Counter, Gauge and Histogram."""

    made: ClassVar[list[tuple[Any, ...]]]
    calls: ClassVar[list[tuple[str, float, Mapping[str, str]]]]

    def __init__(self, *definition: Any) -> None:
        self.made.append(definition)
        self.name = definition[0]

    def record(self, value: float, tags: Mapping[str, str]) -> None:
        self.calls.append((self.name, value, tags))

    _record = set = observe = record


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    class Fresh(Recorded):
        made: ClassVar[list[tuple[Any, ...]]] = []
        calls: ClassVar[list[tuple[str, float, Mapping[str, str]]]] = []

    for name in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(ray_metrics, name, Fresh)
    return Fresh


def test_a_metric_is_made_once_at_its_first_value(ray: type[Recorded]) -> None:
    sink: MetricSink = RayMetricSink()
    assert ray.made == []
    sink.add(metrics.NUM_STEPS, 2, ENGINE)
    sink.add(metrics.NUM_STEPS, 3, ENGINE)
    assert ray.made == [("outrider_engine_steps", metrics.NUM_STEPS.description, ("model_name", "engine"))]
    assert ray.calls == [("outrider_engine_steps", 2, ENGINE), ("outrider_engine_steps", 3, ENGINE)]


def test_every_series_of_a_counter_shows_its_first_zero_and_no_other(ray: type[Recorded]) -> None:
    sink = RayMetricSink()
    for engine in ("e0", "e0", "e1"):
        sink.add(metrics.NUM_STEPS, 0, {**ENGINE, "engine": engine})
    assert ray.calls == [("outrider_engine_steps", 0, ENGINE), ("outrider_engine_steps", 0, {**ENGINE, "engine": "e1"})]
    sink.add(metrics.NUM_STEPS, 2, ENGINE)
    sink.add(metrics.NUM_STEPS, 0, ENGINE)
    assert ray.calls[2:] == [("outrider_engine_steps", 2, ENGINE)]


def test_rays_counter_takes_the_zero() -> None:
    Counter("outrider_test_zero", "", ("a",))._record(0, {"a": "b"})


def test_a_gauge_may_go_to_zero_and_a_histogram_has_its_buckets(ray: type[Recorded]) -> None:
    sink = RayMetricSink()
    sink.set(metrics.RUNNING, 0, ENGINE)
    sink.observe(metrics.TIME_TO_FIRST_TOKEN, 0.1, REQUEST)
    assert [value for _, value, _ in ray.calls] == [0, 0.1]
    assert list(metrics.TIME_TO_FIRST_TOKEN.buckets) in ray.made[1]


def test_labels_are_checked_before_ray_sees_them(ray: type[Recorded]) -> None:
    with pytest.raises(ValueError, match="has the labels"):
        RayMetricSink().add(metrics.NUM_STEPS, 1, {"model_name": "m"})
    assert ray.made == []
