"""Definitions, sinks, and how raw totals become counters."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from outrider.core.dispatch import DraftLinkStatus, EngineStatus, SpeculationTotals
from outrider.core.speculation import SpeculationMode, SpeculationReason
from outrider.telemetry import metrics
from outrider.telemetry.engine_metrics import EngineMetrics
from outrider.telemetry.metrics import ALL_METRICS, Metric, MetricKind
from outrider.telemetry.sink import InMemorySink, MetricSink, NullSink, check_value

LABELS = {"model_name": "m", "engine": "e0"}
TOTALS = SpeculationTotals(
    steps=10,
    speculative_steps=6,
    rounds=20,
    drafted=30,
    verified=24,
    step_seconds=(("verify", 1.5),),
    accepted=15,
    committed=35,
    draft_messages_sent=11,
    draft_messages_received=9,
    late=2,
    stale=3,
    invalid=1,
    accepted_per_position=(8, 5, 2),
    verified_per_position=(9, 8, 7),
)
STATUS = EngineStatus(engine_id="a", ready=True, totals=TOTALS)


class TestDefinitions:
    def test_names_are_unique_and_exported(self) -> None:
        names = [one.name for one in ALL_METRICS]
        assert len(set(names)) == len(names) > 30
        assert {name for name, one in vars(metrics).items() if isinstance(one, Metric)} < set(metrics.__all__)

    def test_names_that_dashboards_of_other_servers_know(self) -> None:
        assert {
            "spec_decode_num_drafts",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
            "spec_decode_num_accepted_tokens_per_pos",
            "gen_ai_server_time_to_first_token",
            "gen_ai_server_time_per_output_token",
            "gen_ai_server_request_duration",
        } <= {one.name for one in ALL_METRICS}

    @pytest.mark.parametrize("name", ["a.b", "", "A", "1a", "steps_total"])
    def test_a_name_that_an_exporter_would_change_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="name"):
            Metric(name=name, kind=MetricKind.GAUGE, description="")

    @pytest.mark.parametrize("buckets", [(), (0.0, 1.0), (2.0, 1.0), (1.0, 1.0)])
    def test_buckets_that_make_no_histogram_are_refused(self, buckets: tuple[float, ...]) -> None:
        with pytest.raises(ValueError, match="buckets"):
            Metric(name="h", kind=MetricKind.HISTOGRAM, description="", buckets=buckets)

    def test_buckets_are_for_histograms(self) -> None:
        with pytest.raises(ValueError, match="buckets"):
            Metric(name="c", kind=MetricKind.COUNTER, description="", buckets=(1.0,))


class TestSinks:
    def test_values_per_label_set(self) -> None:
        sink = InMemorySink()
        sink.add(metrics.NUM_STEPS, 2, LABELS)
        sink.add(metrics.NUM_STEPS, 3, LABELS)
        sink.set(metrics.RUNNING, 4, LABELS)
        sink.set(metrics.RUNNING, 1, LABELS)
        assert sink.value(metrics.NUM_STEPS, LABELS) == 5
        assert sink.value(metrics.RUNNING, LABELS) == 1
        assert sink.value(metrics.NUM_STEPS, {**LABELS, "engine": "e1"}) == 0
        assert sink.label_sets(metrics.NUM_STEPS) == [{"engine": "e0", "model_name": "m"}]

    def test_a_histogram_counts_a_bound_in_its_own_bucket(self) -> None:
        metric = Metric(name="h", kind=MetricKind.HISTOGRAM, description="", buckets=(1.0, 2.0))
        sink = InMemorySink()
        for value in (0.5, 1.0, 1.5, 9.0):
            sink.observe(metric, value, {})
        seen = sink.histogram(metric, {})
        assert (seen.count, seen.sum, seen.bucket_counts) == (4, 12.0, [2, 1, 1])

    @pytest.mark.parametrize("labels", [{}, {"model_name": "m"}, {**LABELS, "more": "x"}])
    def test_labels_are_exactly_those_of_the_definition(self, labels: dict[str, str]) -> None:
        with pytest.raises(ValueError, match="outrider_engine_steps has the labels"):
            InMemorySink().add(metrics.NUM_STEPS, 1, labels)

    def test_kinds_do_not_mix(self) -> None:
        with pytest.raises(ValueError, match="is a counter, not a gauge"):
            InMemorySink().set(metrics.NUM_STEPS, 1, LABELS)

    @pytest.mark.parametrize("value", [-1.0, float("nan")])
    def test_a_counter_takes_no_value_that_would_spoil_it(self, value: float) -> None:
        with pytest.raises(ValueError, match="below 0"):
            check_value(metrics.NUM_STEPS, MetricKind.COUNTER, value, LABELS)

    def test_the_null_sink_is_a_sink(self) -> None:
        sink: MetricSink = NullSink()
        sink.add(metrics.NUM_STEPS, 1, {})
        sink.set(metrics.RUNNING, 1, {})
        sink.observe(metrics.TIME_TO_FIRST_TOKEN, 1, {})


class TestEngineMetrics:
    def test_four_counters_stay_four(self) -> None:
        sink = InMemorySink()
        EngineMetrics(sink, LABELS).publish(STATUS)
        assert sink.value(metrics.NUM_DRAFT_TOKENS, LABELS) == 30
        assert sink.value(metrics.NUM_VERIFIED_TOKENS, LABELS) == 24
        assert sink.value(metrics.NUM_ACCEPTED_TOKENS, LABELS) == 15
        assert sink.value(metrics.NUM_COMMITTED_TOKENS, LABELS) == 35
        assert sink.value(metrics.NUM_ROUNDS, LABELS) == 20

    def test_drafts_are_the_rounds_that_verified_a_first_position(self) -> None:
        sink = InMemorySink()
        EngineMetrics(sink, LABELS).publish(STATUS)
        assert sink.value(metrics.NUM_DRAFTS, LABELS) == 9

    def test_every_position_has_its_series(self) -> None:
        sink = InMemorySink()
        EngineMetrics(sink, LABELS).publish(STATUS)
        accepted = [
            sink.value(metrics.NUM_ACCEPTED_PER_POS, {**LABELS, "position": position}) for position in ("0", "1", "2")
        ]
        assert accepted == [8, 5, 2]
        assert sink.value(metrics.NUM_VERIFIED_PER_POS, {**LABELS, "position": "2"}) == 7

    def test_the_same_report_twice_counts_once(self) -> None:
        sink = InMemorySink()
        publisher = EngineMetrics(sink, LABELS)
        publisher.publish(STATUS)
        publisher.publish(STATUS)
        assert sink.value(metrics.NUM_ACCEPTED_TOKENS, LABELS) == 15
        assert sink.value(metrics.STEP_SECONDS, {**LABELS, "phase": "verify"}) == 1.5

    def test_growth_is_added(self) -> None:
        sink = InMemorySink()
        publisher = EngineMetrics(sink, LABELS)
        publisher.publish(STATUS)
        grown = replace(
            TOTALS,
            accepted=20,
            accepted_per_position=(10, 6, 3, 1),
            step_seconds=(("emit", 0.25), ("verify", 2.0)),
        )
        publisher.publish(replace(STATUS, totals=grown))
        assert sink.value(metrics.NUM_ACCEPTED_TOKENS, LABELS) == 20
        assert sink.value(metrics.NUM_ACCEPTED_PER_POS, {**LABELS, "position": "3"}) == 1
        assert sink.value(metrics.STEP_SECONDS, {**LABELS, "phase": "verify"}) == 2.0
        assert sink.value(metrics.STEP_SECONDS, {**LABELS, "phase": "emit"}) == 0.25

    @pytest.mark.parametrize(("engine_id", "epoch"), [("b", 1), ("a", 2)])
    def test_a_rebuilt_engine_counts_from_zero_even_if_it_is_already_further(self, engine_id: str, epoch: int) -> None:
        sink = InMemorySink()
        publisher = EngineMetrics(sink, LABELS)
        publisher.publish(STATUS, engine_epoch=1)
        further = SpeculationTotals(steps=100, accepted=40)
        publisher.publish(EngineStatus(engine_id=engine_id, ready=True, totals=further), engine_epoch=epoch)
        assert sink.value(metrics.NUM_ACCEPTED_TOKENS, LABELS) == 15 + 40
        assert sink.value(metrics.NUM_STEPS, LABELS) == 10 + 100

    def test_a_total_that_went_down_is_a_new_engine_for_all_totals(self) -> None:
        sink = InMemorySink()
        publisher = EngineMetrics(sink, LABELS)
        publisher.publish(STATUS)
        publisher.publish(replace(STATUS, totals=SpeculationTotals(steps=4, committed=50)))
        assert sink.value(metrics.NUM_STEPS, LABELS) == 10 + 4
        assert sink.value(metrics.NUM_COMMITTED_TOKENS, LABELS) == 35 + 50

    def test_mode_and_reason_are_one_hot(self) -> None:
        sink = InMemorySink()
        publisher = EngineMetrics(sink, LABELS)
        publisher.publish(replace(STATUS, mode=SpeculationMode.CACHED, reason=SpeculationReason.ON))
        publisher.publish(replace(STATUS, mode=SpeculationMode.OFF, reason=SpeculationReason.BATCH_TOO_LARGE))
        modes = {
            one.value: sink.value(metrics.SPECULATION_MODE, {**LABELS, "mode": one.value}) for one in SpeculationMode
        }
        reasons = {
            one.value: sink.value(metrics.SPECULATION_REASON, {**LABELS, "reason": one.value})
            for one in SpeculationReason
        }
        assert modes == {"off": 1, "sequential": 0, "cached": 0}
        assert [name for name, value in reasons.items() if value] == ["batch_too_large"]
        assert len(sink.label_sets(metrics.SPECULATION_REASON)) == len(SpeculationReason)

    def test_load_gauges(self) -> None:
        sink = InMemorySink()
        EngineMetrics(sink, LABELS).publish(replace(STATUS, running=3, waiting=2, kv_usage=0.5))
        assert [sink.value(one, LABELS) for one in (metrics.RUNNING, metrics.WAITING, metrics.KV_USAGE)] == [3, 2, 0.5]

    def test_an_estimate_shows_once_there_is_one(self) -> None:
        sink = InMemorySink()
        publisher = EngineMetrics(sink, LABELS)
        publisher.publish(STATUS)
        assert sink.label_sets(metrics.ESTIMATED_SPEEDUP) == []
        publisher.publish(replace(STATUS, estimated_speedup=1.8))
        assert sink.value(metrics.ESTIMATED_SPEEDUP, LABELS) == 1.8

    def test_every_hop_is_seen_once(self) -> None:
        sink = InMemorySink()
        publisher = EngineMetrics(sink, LABELS)
        publisher.publish(STATUS, hops_s=[0.0004, 0.0004, 0.02])
        publisher.publish(STATUS, hops_s=[])
        seen = sink.histogram(metrics.DRAFT_HOP, LABELS)
        assert seen.count == 3
        assert seen.sum == pytest.approx(0.0208)
        assert seen.bucket_counts[metrics.DRAFT_HOP.buckets.index(0.0005)] == 2

    def test_a_draft_that_left_long_ago_is_forgotten(self) -> None:
        class Heard(InMemorySink):
            def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
                super().set(metric, value, labels)
                if "draft" in labels:
                    heard.append((metric.name, labels["draft"], value))

        heard: list[tuple[str, str, float]] = []
        publisher = EngineMetrics(Heard(), LABELS)
        for port in range(50):  # each is another replica, that comes and goes
            link = DraftLinkStatus(address=f"d:{port}", connected=True)
            publisher.publish(replace(STATUS, draft_links=(link,)))
        heard.clear()
        for _ in range(300):
            publisher.publish(replace(STATUS, draft_links=(link,)))
        assert ("outrider_draft_link_connected", "d:48", 0.0) in heard
        heard.clear()
        publisher.publish(replace(STATUS, draft_links=(link,)))
        assert {address for _, address, _ in heard} == {"d:49"}

    def test_a_draft_that_left_is_not_connected_and_its_losses_never_go_down(self) -> None:
        sink = InMemorySink()
        publisher = EngineMetrics(sink, LABELS)
        draft = {**LABELS, "draft": "d:1"}
        publisher.publish(replace(STATUS, draft_links=(DraftLinkStatus(address="d:1", connected=True, losses=2),)))
        assert sink.value(metrics.DRAFT_CONNECTED, draft) == 1
        publisher.publish(replace(STATUS, draft_links=(DraftLinkStatus(address="", connected=False, losses=3),)))
        assert sink.value(metrics.DRAFT_CONNECTED, draft) == 0
        assert sink.label_sets(metrics.DRAFT_CONNECTED) == [draft]
        publisher.publish(replace(STATUS, draft_links=(DraftLinkStatus(address="d:1", connected=True, losses=1),)))
        assert sink.value(metrics.DRAFT_CONNECTED, draft) == 1
        assert sink.value(metrics.DRAFT_LOSSES, LABELS) == 4

    def test_a_link_shows_its_way_and_what_it_holds(self) -> None:
        sink = InMemorySink()
        link = DraftLinkStatus(address="d:1", connected=True, open_sequences=4, round_trip_s=0.002)
        EngineMetrics(sink, LABELS).publish(replace(STATUS, draft_links=(link,)))
        draft = {**LABELS, "draft": "d:1"}
        assert sink.value(metrics.DRAFT_ROUND_TRIP, draft) == 0.002
        assert sink.value(metrics.DRAFT_OPEN_SEQUENCES, draft) == 4

    def test_speculation_that_goes_on_and_off_is_counted_as_switches(self) -> None:
        sink = InMemorySink()
        publisher = EngineMetrics(sink, LABELS)
        off, cached, sequential = SpeculationMode.OFF, SpeculationMode.CACHED, SpeculationMode.SEQUENTIAL
        for mode in (off, off, cached, sequential, off):
            publisher.publish(replace(STATUS, mode=mode))
        assert sink.value(metrics.SPECULATION_SWITCHES, LABELS) == 2

    def test_tables_have_their_hit_rate(self) -> None:
        sink = InMemorySink()
        totals = replace(TOTALS, cached_lookups=10, cached_hits=8)
        EngineMetrics(sink, LABELS).publish(replace(STATUS, totals=totals))
        assert sink.value(metrics.NUM_CACHED_LOOKUPS, LABELS) == 10
        assert sink.value(metrics.NUM_CACHED_HITS, LABELS) == 8

    def test_labels_are_complete_from_the_start(self) -> None:
        with pytest.raises(ValueError, match="labels"):
            EngineMetrics(InMemorySink(), {"model_name": "m"})
