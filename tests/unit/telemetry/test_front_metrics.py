"""What the front counts over the incarnations of its engine."""

import pytest

from outrider.telemetry import metrics
from outrider.telemetry.front_metrics import FrontMetrics
from outrider.telemetry.sink import InMemorySink

LABELS = {"model_name": "m", "engine": "e0"}


def test_starts_and_failures_begin_at_zero_and_ready_follows() -> None:
    sink = InMemorySink()

    def seen() -> tuple[float, float, float]:
        starts, failures = (sink.value(one, LABELS) for one in (metrics.ENGINE_STARTS, metrics.ENGINE_FAILURES))
        return starts, failures, sink.value(metrics.READY, LABELS)

    front = FrontMetrics(sink, LABELS)
    assert sink.label_sets(metrics.ENGINE_FAILURES) == [LABELS]
    front.starting()
    assert seen() == (1, 0, 0)
    front.ready()
    assert seen() == (1, 0, 1)
    front.failed()
    assert seen() == (1, 1, 0)
    front.starting()
    front.ready()
    front.closed()
    assert seen() == (2, 1, 0)


def test_what_is_so_can_be_said_again() -> None:
    sink = InMemorySink()
    front = FrontMetrics(sink, LABELS)
    front.starting()
    front.ready()
    sink.set(metrics.READY, 0, LABELS)  # as if it had been forgotten
    front.repeat()
    assert sink.value(metrics.READY, LABELS) == 1
    assert sink.value(metrics.ENGINE_STARTS, LABELS) == 1


def test_labels_are_complete_from_the_start() -> None:
    with pytest.raises(ValueError, match="labels"):
        FrontMetrics(InMemorySink(), {"model_name": "m"})
