"""The span tree of a request, read back from an exporter in memory."""

import io
import json
import sys
from collections.abc import Iterator, Mapping

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.core.dispatch import SequenceEnd, SequenceErrorCode, SequenceFailure, SpeculationOutcome, Timings
from outrider.core.errors import ConfigError
from outrider.core.generation import ChatMessage, GenerationRequest
from outrider.core.request import SequenceRequest, StopConditions
from outrider.core.sequence import Finish, FinishReason
from outrider.core.speculation import SpeculationMode, SpeculationReason, SpeculationStats
from outrider.telemetry.draft_spans import DraftTracer
from outrider.telemetry.request_spans import RequestTracer
from outrider.telemetry.sequence_spans import SequenceTracer
from outrider.telemetry.spans import (
    DraftSpans,
    NullRequestSpans,
    NullSequenceSpans,
    RequestSpans,
    RoundRecord,
    SequenceSpans,
    StepRecord,
    trace_id_of,
)
from outrider.telemetry.tracing import STEP_SPAN, SpanExport, TracingConfig, tracer_provider

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
S = 1_000_000_000
NOW_NS = 1_000 * S
CONFIG = TracingConfig(service_name="outrider-test", instance_id="i0")


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    provider = tracer_provider(CONFIG, exporter=exporter)
    yield provider
    provider.shutdown()


def sequence_request(traceparent: str) -> SequenceRequest:
    return SequenceRequest(
        request_id="r1",
        choice_index=1,
        prompt_token_ids=(70001, 70002, 70003),
        stop=StopConditions(max_tokens=8, strings=("secret stop",)),
        noise_key=1,
        traceparent=traceparent,
    )


def sequence_end(**changes: object) -> SequenceEnd:
    stats = SpeculationStats(drafted=9, late=1)
    stats.count_round(verified=0, accepted=0, committed=1)
    stats.count_round(verified=4, accepted=3, committed=4)
    values: dict[str, object] = {
        "stream_key": 5,
        "finish": Finish(reason=FinishReason.STOP, stop_string_index=0),
        "cached_prompt_tokens": 2,
        "timings": Timings(queue_s=1.0, prefill_s=2.0, first_token_s=3.0, total_s=10.0),
        "speculation": SpeculationOutcome(
            mode=SpeculationMode.SEQUENTIAL, reason=SpeculationReason.ON, stats=stats, estimated_speedup=1.5
        ),
    }
    return SequenceEnd(**{**values, **changes})  # type: ignore[arg-type]


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def attributes(span: ReadableSpan) -> Mapping[str, object]:
    assert span.attributes is not None
    return span.attributes


def parent_id(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def run_sequence(engine: SequenceTracer, traceparent: str, end: SequenceEnd) -> None:
    engine.sequence_ended(engine.sequence_arrived(sequence_request(traceparent)), end)


def step(*traceparents: str) -> StepRecord:
    rounds = tuple(
        RoundRecord(
            traceparent=one, first_token_index=8, num_draft_tokens=5, num_accepted=3, num_committed=4, source="draft"
        )
        for one in traceparents
    )
    return StepRecord(rounds=rounds, num_rows=6 * len(rounds), seconds={"forward": 0.25, "verify": 0.5})


def run_request(provider: TracerProvider, *, traceparent: str = CLIENT) -> None:
    engine = SequenceTracer(provider, engine_id="e0", wall_clock_ns=lambda: NOW_NS)
    request = RequestTracer(provider).start(request_id="r1", model="m", traceparent=traceparent)
    request.asked(GenerationRequest(text="secret question"))
    with request.tokenizing():
        pass
    run_sequence(engine, request.traceparent, sequence_end())
    request.end(outcome="completed", prompt_tokens=3, output_tokens=5)


class TestTree:
    def test_every_span_hangs_where_it_belongs(self, provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
        run_request(provider)
        spans = by_name(exporter)
        tree = {name: parent_id(span) for name, span in spans.items()}
        root = spans["outrider.request"].get_span_context()
        sequence = spans["outrider.engine.sequence"].get_span_context()
        assert root is not None
        assert sequence is not None
        assert tree == {
            "outrider.request": int("b7ad6b7169203331", 16),
            "tokenize": root.span_id,
            "outrider.engine.sequence": root.span_id,
            "queue": sequence.span_id,
            "prefill": sequence.span_id,
            "decode": sequence.span_id,
        }
        contexts = [span.get_span_context() for span in spans.values()]
        assert {one.trace_id for one in contexts if one is not None} == {int(TRACE_ID, 16)}

    @pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'0' * 32}-b7ad6b7169203331-01"])
    def test_without_a_valid_parent_a_new_trace_begins(
        self, traceparent: str, provider: TracerProvider, exporter: InMemorySpanExporter
    ) -> None:
        run_request(provider, traceparent=traceparent)
        spans = by_name(exporter)
        assert spans["outrider.request"].parent is None
        assert len({span.get_span_context().trace_id for span in spans.values()}) == 1  # type: ignore[union-attr]

    def test_stages_lie_end_to_end_from_the_start(
        self, provider: TracerProvider, exporter: InMemorySpanExporter
    ) -> None:
        run_request(provider)
        spans = by_name(exporter)
        start, end = NOW_NS, NOW_NS + 10 * S
        times = {name: (spans[name].start_time, spans[name].end_time) for name in ("queue", "prefill", "decode")}
        assert times == {
            "queue": (start, start + S),
            "prefill": (start + S, start + 3 * S),
            "decode": (start + 3 * S, end),
        }
        sequence = spans["outrider.engine.sequence"]
        assert (sequence.start_time, sequence.end_time) == (start, end)
        assert [(one.name, one.timestamp) for one in sequence.events] == [("first_token", start + 3 * S)]

    def test_a_sequence_that_never_left_the_queue_has_no_other_stage(
        self, provider: TracerProvider, exporter: InMemorySpanExporter
    ) -> None:
        failure = SequenceFailure(code=SequenceErrorCode.DEADLINE, message="timeout_ms: has passed")
        end = sequence_end(
            finish=None,
            failure=failure,
            timings=Timings(queue_s=4.0, first_token_s=4.0, total_s=4.0),
            speculation=SpeculationOutcome(),
        )
        run_sequence(SequenceTracer(provider), CLIENT, end)
        spans = by_name(exporter)
        assert set(spans) == {"outrider.engine.sequence", "queue"}
        sequence = spans["outrider.engine.sequence"]
        assert sequence.status.status_code is trace.StatusCode.ERROR
        assert attributes(sequence)["error.type"] == "deadline"
        assert not sequence.events


class TestAttributes:
    def test_the_sequence_says_what_speculation_did(
        self, provider: TracerProvider, exporter: InMemorySpanExporter
    ) -> None:
        run_request(provider)
        found = attributes(by_name(exporter)["outrider.engine.sequence"])
        expected = {
            "outrider.request_id": "r1",
            "outrider.choice_index": 1,
            "outrider.engine_id": "e0",
            "outrider.cached_prompt_tokens": 2,
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.response.finish_reasons": ("stop",),
            "outrider.speculation.mode": "sequential",
            "outrider.speculation.reason": "on",
            "outrider.speculation.rounds": 2,
            "outrider.speculation.speculative_rounds": 1,
            "outrider.speculation.drafted": 9,
            "outrider.speculation.verified": 4,
            "outrider.speculation.accepted": 3,
            "outrider.speculation.committed": 5,
            "outrider.speculation.cut": 0,
            "outrider.speculation.late": 1,
            "outrider.speculation.accepted_per_position": (1, 1, 1, 0),
            "outrider.speculation.estimated_speedup": 1.5,
        }
        assert {name: found.get(name) for name in expected} == expected

    def test_the_root_says_how_it_ended(self, provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
        run_request(provider)
        root = by_name(exporter)["outrider.request"]
        assert attributes(root)["outrider.outcome"] == "completed"
        assert attributes(root)["gen_ai.usage.output_tokens"] == 5
        assert root.status.status_code is trace.StatusCode.UNSET
        assert root.resource.attributes["service.name"] == "outrider-test"
        assert root.resource.attributes["service.instance.id"] == "i0"

    @pytest.mark.parametrize(
        ("outcome", "status"),
        [("abandoned", trace.StatusCode.UNSET), ("EngineUnavailable", trace.StatusCode.ERROR)],
    )
    def test_only_errors_are_errors_and_the_first_end_counts(
        self, outcome: str, status: trace.StatusCode, provider: TracerProvider, exporter: InMemorySpanExporter
    ) -> None:
        span = RequestTracer(provider).start(request_id="r1", model="m", traceparent="")
        span.end(outcome=outcome, prompt_tokens=3, output_tokens=0)
        span.end(outcome="completed", prompt_tokens=3, output_tokens=0)
        (root,) = exporter.get_finished_spans()
        assert root.status.status_code is status
        assert attributes(root)["outrider.outcome"] == outcome

    def test_no_text_and_no_token_leaves(self, provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
        span = RequestTracer(provider).start(request_id="r1", model="m", traceparent=CLIENT)
        with pytest.raises(ValueError, match="secret"), span.tokenizing():
            raise ValueError("secret prompt")
        span.end(outcome="InvalidRequest", prompt_tokens=0, output_tokens=0)
        run_request(provider)
        failure = SequenceFailure(code=SequenceErrorCode.INVALID, message="secret message")
        run_sequence(SequenceTracer(provider), CLIENT, sequence_end(finish=None, failure=failure))
        everything = "".join(one.to_json() for one in exporter.get_finished_spans())
        assert "tokenize" in everything
        assert "secret" not in everything
        assert "70001" not in everything

    def test_the_question_is_there_for_those_who_opted_in(
        self, provider: TracerProvider, exporter: InMemorySpanExporter
    ) -> None:
        chat = (ChatMessage(role="user", content="why?"),)
        for request in (GenerationRequest(text="a secret"), GenerationRequest(messages=chat)):
            span = RequestTracer(provider, record_text=True).start(request_id="r", model="m", traceparent="")
            span.asked(request)
            span.end(outcome="completed", prompt_tokens=3, output_tokens=0)
        asked = [json.loads(str(attributes(one)["gen_ai.input.messages"])) for one in exporter.get_finished_spans()]
        assert asked == [[{"role": "user", "content": "a secret"}], [{"role": "user", "content": "why?"}]]


class TestSteps:
    def test_rounds_hang_below_their_sequences_and_link_to_the_step_they_shared(
        self, provider: TracerProvider, exporter: InMemorySpanExporter
    ) -> None:
        engine = SequenceTracer(provider, engine_id="e0", wall_clock_ns=lambda: NOW_NS)
        arrived = [engine.sequence_arrived(sequence_request(CLIENT)) for _ in range(2)]
        assert engine.takes_step()
        engine.step_ended(step(arrived[0].traceparent, "", arrived[1].traceparent))
        for one in arrived:
            engine.sequence_ended(one, sequence_end())
        spans = exporter.get_finished_spans()
        (whole,) = [one for one in spans if one.name == STEP_SPAN]
        rounds = [one for one in spans if one.name == "round"]
        sequences = [one for one in spans if one.name == "outrider.engine.sequence"]
        assert whole.parent is None
        assert attributes(whole)["outrider.step.sequences"] == 3
        assert attributes(whole)["outrider.step.forward_s"] == 0.25
        assert [one.context for one in whole.links] == [one.get_span_context() for one in sequences]
        assert [parent_id(one) for one in rounds] == [one.get_span_context().span_id for one in sequences]  # type: ignore[union-attr]
        assert [link.context for one in rounds for link in one.links] == [whole.get_span_context()] * 2
        assert attributes(rounds[0])["outrider.round.accepted"] == 3
        assert {(one.start_time, one.end_time) for one in (whole, *rounds)} == {(NOW_NS - 3 * S // 4, NOW_NS)}

    def test_one_step_in_so_many_is_taken_and_only_while_a_traced_sequence_runs(self, provider: TracerProvider) -> None:
        engine = SequenceTracer(provider, step_interval=3)
        assert not engine.takes_step()
        one = engine.sequence_arrived(sequence_request(CLIENT))
        assert [engine.takes_step() for _ in range(7)] == [True, False, False, True, False, False, True]
        engine.sequence_ended(one, sequence_end())
        assert not engine.takes_step()

    def test_a_step_is_recorded_whatever_the_ratio(self, exporter: InMemorySpanExporter) -> None:
        config = TracingConfig(service_name="s", instance_id="i", sampling_ratio=0.0)
        engine = SequenceTracer(tracer_provider(config, exporter=exporter))
        engine.step_ended(step(engine.sequence_arrived(sequence_request(CLIENT)).traceparent))
        assert STEP_SPAN in by_name(exporter)


class TestDraft:
    def test_the_draft_hangs_below_the_sequence_and_marks_some_of_what_it_sends(
        self, provider: TracerProvider, exporter: InMemorySpanExporter
    ) -> None:
        engine = SequenceTracer(provider)
        arrived = engine.sequence_arrived(sequence_request(CLIENT))
        draft = DraftTracer(provider, interval=2)
        draft.opened(7, arrived.traceparent, num_tokens=12)
        for size in range(5):
            draft.drafted(7, what="block", size=size)
        draft.drafted(8, what="block", size=1)
        draft.closed(8)
        draft.closed(7)
        engine.sequence_ended(arrived, sequence_end())
        spans = exporter.get_finished_spans()
        (held,) = [one for one in spans if one.name == "outrider.draft.sequence"]
        sequence = by_name(exporter)["outrider.engine.sequence"].get_span_context()
        assert sequence is not None
        assert parent_id(held) == sequence.span_id
        assert attributes(held) == {"outrider.draft.opening_tokens": 12, "outrider.draft.sent": 5}
        assert [attributes(one)["outrider.draft.size"] for one in spans if one.name == "draft"] == [0, 2, 4]

    @pytest.mark.parametrize("traceparent", ["", CLIENT[:-2] + "00"])
    def test_an_untraced_sequence_leaves_nothing(
        self, traceparent: str, provider: TracerProvider, exporter: InMemorySpanExporter
    ) -> None:
        draft: DraftSpans = DraftTracer(provider)
        draft.opened(7, traceparent, num_tokens=12)
        draft.drafted(7, what="table", size=1)
        draft.closed(7)
        assert exporter.get_finished_spans() == ()


class TestSampling:
    def test_nothing_of_an_unsampled_trace_is_recorded_on_either_side(self, exporter: InMemorySpanExporter) -> None:
        config = TracingConfig(service_name="s", instance_id="i", sampling_ratio=0.0)
        run_request(tracer_provider(config, exporter=exporter), traceparent="")
        assert exporter.get_finished_spans() == ()

    def test_the_client_decides_over_its_own_trace(self, exporter: InMemorySpanExporter) -> None:
        config = TracingConfig(service_name="s", instance_id="i", sampling_ratio=0.0)
        run_request(tracer_provider(config, exporter=exporter), traceparent=CLIENT)
        assert len(exporter.get_finished_spans()) == 6
        exporter.clear()
        run_request(tracer_provider(CONFIG, exporter=exporter), traceparent=CLIENT[:-2] + "00")
        assert exporter.get_finished_spans() == ()


class TestSetUp:
    def test_the_global_provider_stays_as_it_is(self, provider: TracerProvider) -> None:
        assert trace.get_tracer_provider() is not provider

    def test_console(self) -> None:
        stream = io.StringIO()
        config = TracingConfig(service_name="s", instance_id="i", export=SpanExport.CONSOLE)
        provider = tracer_provider(config, console=stream)
        RequestTracer(provider).start(request_id="r1", model="m", traceparent="").end(
            outcome="completed", prompt_tokens=1, output_tokens=1
        )
        provider.shutdown()
        assert '"outrider.request"' in stream.getvalue()

    def test_console_without_a_stream_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="stream"):
            tracer_provider(TracingConfig(service_name="s", instance_id="i", export=SpanExport.CONSOLE))

    def test_a_missing_exporter_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
        config = TracingConfig(service_name="s", instance_id="i", export=SpanExport.OTLP, endpoint="127.0.0.1:1")
        with pytest.raises(ConfigError, match="opentelemetry-exporter-otlp-proto-grpc"):
            tracer_provider(config)

    @pytest.mark.timeout(30)
    def test_an_otlp_exporter_starts_without_a_collector(self) -> None:
        config = TracingConfig(service_name="s", instance_id="i", export=SpanExport.OTLP, endpoint="127.0.0.1:1")
        tracer_provider(config).shutdown()

    @pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
    def test_a_ratio_is_a_share(self, ratio: float) -> None:
        with pytest.raises(ConfigError, match="sampling_ratio"):
            TracingConfig(service_name="s", instance_id="i", sampling_ratio=ratio)

    @pytest.mark.parametrize(
        ("export", "endpoint"), [(SpanExport.OTLP, None), (SpanExport.NONE, "h:1"), (SpanExport.CONSOLE, "h:1")]
    )
    def test_an_endpoint_belongs_to_otlp(self, export: SpanExport, endpoint: str | None) -> None:
        with pytest.raises(ConfigError, match="endpoint"):
            TracingConfig(service_name="s", instance_id="i", export=export, endpoint=endpoint)


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        (CLIENT, TRACE_ID),
        (f"{CLIENT}-later", TRACE_ID),
        ("", ""),
        ("nonsense", ""),
        ("a-text of the client-b-c", ""),
        (f"{CLIENT}\n", ""),
    ],
)
def test_the_trace_of_a_traceparent(traceparent: str, trace_id: str) -> None:
    assert trace_id_of(traceparent) == trace_id


class TestNull:
    def test_the_clients_trace_goes_on(self) -> None:
        spans: RequestSpans = NullRequestSpans()
        span = spans.start(request_id="r1", model="m", traceparent=CLIENT)
        with span.tokenizing():
            pass
        span.end(outcome="completed", prompt_tokens=1, output_tokens=1)
        assert span.traceparent == CLIENT

    def test_null_and_real_are_the_same_port(self, provider: TracerProvider) -> None:
        ports: list[SequenceSpans] = [NullSequenceSpans(), SequenceTracer(provider)]
        requests: list[RequestSpans] = [NullRequestSpans(), RequestTracer(provider)]
        for port in ports:
            port.sequence_ended(port.sequence_arrived(sequence_request("")), sequence_end())
            assert not port.takes_step()
            port.step_ended(step(CLIENT))
        assert all(one.start(request_id="r", model="m", traceparent=CLIENT).traceparent for one in requests)
