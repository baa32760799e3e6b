"""A draft's reports as metrics."""

from dataclasses import asdict

import pytest

from outrider.draft.counters import DraftCounters
from outrider.telemetry import metrics
from outrider.telemetry.draft_metrics import DraftMetrics, DraftReport
from outrider.telemetry.metrics import DRAFT_TOTALS
from outrider.telemetry.sink import InMemorySink

LABELS = {"model_name": "d", "replica": "r0"}


def test_every_counter_of_a_draft_has_its_metric() -> None:
    assert asdict(DraftCounters()).keys() == DRAFT_TOTALS.keys()


def test_totals_become_increments_and_a_new_draft_counts_from_zero() -> None:
    sink = InMemorySink()
    publisher = DraftMetrics(sink, LABELS)
    for blocks in (5, 5, 8, 2):
        publisher.publish(DraftReport(ready=True, totals={"blocks": blocks}))
    assert sink.value(DRAFT_TOTALS["blocks"], LABELS) == 8 + 2
    assert sink.label_sets(DRAFT_TOTALS["drift"]) == [LABELS], "alarms need the zero"


def test_gauges_follow_the_last_report() -> None:
    sink = InMemorySink()
    publisher = DraftMetrics(sink, LABELS)
    publisher.publish(DraftReport(ready=True, links=2, sequences=7, kv_usage=0.5, step_s=0.001))
    values = [
        sink.value(one, LABELS)
        for one in (
            metrics.DRAFT_READY,
            metrics.DRAFT_LINKS,
            metrics.DRAFT_SEQUENCES,
            metrics.DRAFT_KV_USAGE,
            metrics.DRAFT_STEP_SECONDS,
        )
    ]
    assert values == [1, 2, 7, 0.5, 0.001]
    publisher.publish(DraftReport())
    assert sink.value(metrics.DRAFT_READY, LABELS) == 0


def test_labels_are_complete_from_the_start() -> None:
    with pytest.raises(ValueError, match="labels"):
        DraftMetrics(InMemorySink(), {"model_name": "d"})
