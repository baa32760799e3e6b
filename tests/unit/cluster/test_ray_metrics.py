"""What Ray's metrics are told; no cluster runs."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from outrider.telemetry import metrics
from outrider.telemetry.sink import MetricSink
from outrider_cluster import ray_metrics
from outrider_cluster.ray_metrics import RayMetricSink

ENGINE = {"model_name": "m", "engine": "e0"}
REQUEST = {"model_name": "m", "traffic_class": "other"}


class Recorded:
    """Stands for Ray's Counter, Gauge and Histogram."""

    made: ClassVar[list[tuple[Any, ...]]]
    calls: ClassVar[list[tuple[str, float, Mapping[str, str]]]]

    def __init__(self, *definition: Any) -> None:
        self.made.append(definition)
        self.name = definition[0]

    def record(self, value: float, tags: Mapping[str, str]) -> None:
        self.calls.append((self.name, value, tags))

    inc = set = observe = record


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


def test_nothing_is_added_for_an_increment_of_zero_which_ray_refuses(ray: type[Recorded]) -> None:
    RayMetricSink().add(metrics.NUM_STEPS, 0, ENGINE)
    assert ray.calls == []


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
