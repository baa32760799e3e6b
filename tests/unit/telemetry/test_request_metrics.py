"""The router's events as metrics."""

from dataclasses import replace

import pytest

from outrider.core.dispatch import SpeculationOutcome, Timings
from outrider.core.generation import ChoiceEnd, Usage
from outrider.core.sequence import Finish, FinishReason
from outrider.router.metrics import RouterMetrics
from outrider.router.timing import LoopTime
from outrider.telemetry import metrics
from outrider.telemetry.recent_errors import RecentErrors
from outrider.telemetry.request_metrics import OTHER_CLASS, RequestMetrics, time_per_output_token
from outrider.telemetry.sink import InMemorySink

MODEL = {"model_name": "m", "router": "r0"}
CHAT = {**MODEL, "traffic_class": "chat"}


def choice_end(*, tokens: int, first_token_s: float = 0.5, total_s: float = 2.5) -> ChoiceEnd:
    return ChoiceEnd(
        choice_index=0,
        finish=Finish(reason=FinishReason.LENGTH),
        stop_string=None,
        usage=Usage(prompt_tokens=7, completion_tokens=tokens, cached_prompt_tokens=4),
        timings=Timings(first_token_s=first_token_s, total_s=total_s),
        speculation=SpeculationOutcome(),
    )


@pytest.fixture
def sink() -> InMemorySink:
    return InMemorySink()


@pytest.fixture
def counted(sink: InMemorySink) -> RequestMetrics:
    return RequestMetrics(sink, model="m", router="r0", traffic_classes=["chat"])


class TestTimePerOutputToken:
    def test_the_gaps_are_one_fewer_than_the_tokens(self) -> None:
        assert time_per_output_token(total_s=2.5, first_token_s=0.5, num_tokens=5) == 0.5

    @pytest.mark.parametrize("num_tokens", [0, 1])
    def test_without_a_gap_there_is_none(self, num_tokens: int) -> None:
        assert time_per_output_token(total_s=2.5, first_token_s=0.5, num_tokens=num_tokens) is None

    def test_one_token_is_not_observed(self, sink: InMemorySink, counted: RequestMetrics) -> None:
        counted.choice_finished(traffic_class="chat", end=choice_end(tokens=1))
        assert sink.histogram(metrics.TIME_PER_OUTPUT_TOKEN, CHAT).count == 0
        counted.choice_finished(traffic_class="chat", end=choice_end(tokens=2))
        seen = sink.histogram(metrics.TIME_PER_OUTPUT_TOKEN, CHAT)
        assert (seen.count, seen.sum) == (1, 2.0)


class TestRequestMetrics:
    def test_it_fits_the_router(self, counted: RequestMetrics) -> None:
        seam: RouterMetrics = counted
        seam.choice_finished(traffic_class="chat", end=choice_end(tokens=2))

    def test_a_request_that_completes(self, sink: InMemorySink, counted: RequestMetrics) -> None:
        counted.request_started(traffic_class="chat", prompt_tokens=7)
        counted.first_token(traffic_class="chat", after_s=0.3)
        counted.tokens_streamed(traffic_class="chat", count=1)
        counted.tokens_streamed(traffic_class="chat", count=4)
        counted.choice_finished(traffic_class="chat", end=choice_end(tokens=5))
        counted.request_finished(traffic_class="chat", outcome="completed", after_s=2.0)
        assert sink.value(metrics.REQUESTS_STARTED, CHAT) == 1
        assert sink.value(metrics.PROMPT_TOKENS, CHAT) == 7
        assert sink.value(metrics.CACHED_PROMPT_TOKENS, CHAT) == 4
        assert sink.value(metrics.OUTPUT_TOKENS, CHAT) == 5
        assert sink.value(metrics.CHOICES_FINISHED, {**CHAT, "finish_reason": "length"}) == 1
        assert sink.value(metrics.REQUESTS_FINISHED, {**CHAT, "outcome": "completed"}) == 1
        assert sink.histogram(metrics.TIME_TO_FIRST_TOKEN, CHAT).sum == 0.3
        assert sink.histogram(metrics.REQUEST_DURATION, {**CHAT, "outcome": "completed"}).sum == 2.0

    def test_errors_have_their_own_series(self, sink: InMemorySink, counted: RequestMetrics) -> None:
        counted.request_refused(error="Overloaded")
        counted.request_finished(traffic_class="chat", outcome="EngineUnavailable", after_s=1.0)
        assert sink.value(metrics.REQUESTS_REFUSED, {**MODEL, "error": "Overloaded"}) == 1
        assert sink.value(metrics.REQUESTS_FINISHED, {**CHAT, "outcome": "EngineUnavailable"}) == 1
        assert sink.value(metrics.REQUESTS_FINISHED, {**CHAT, "outcome": "completed"}) == 0

    def test_tokens_of_a_long_stream_show_before_its_end(self, sink: InMemorySink, counted: RequestMetrics) -> None:
        counted.tokens_streamed(traffic_class="chat", count=3)
        counted.flush()
        counted.flush()
        assert sink.value(metrics.OUTPUT_TOKENS, CHAT) == 3

    def test_clients_cannot_create_series(self, sink: InMemorySink, counted: RequestMetrics) -> None:
        for index in range(100):
            counted.request_started(traffic_class=f"class-{index}", prompt_tokens=1)
        assert [one["traffic_class"] for one in sink.label_sets(metrics.REQUESTS_STARTED)] == ["chat", OTHER_CLASS]
        assert sink.value(metrics.REQUESTS_STARTED, {**MODEL, "traffic_class": OTHER_CLASS}) == 100

    def test_waiting_and_prefill_are_apart(self, sink: InMemorySink, counted: RequestMetrics) -> None:
        end = replace(
            choice_end(tokens=2), timings=Timings(queue_s=0.25, prefill_s=0.5, first_token_s=0.8, total_s=1.0)
        )
        counted.choice_finished(traffic_class="chat", end=end)
        assert sink.histogram(metrics.QUEUE_TIME, CHAT).sum == 0.25
        assert sink.histogram(metrics.PREFILL_TIME, CHAT).sum == 0.5

    def test_requests_that_run_are_a_gauge(self, sink: InMemorySink, counted: RequestMetrics) -> None:
        for _ in range(3):
            counted.request_started(traffic_class="chat", prompt_tokens=1)
        counted.request_finished(traffic_class="chat", outcome="completed", after_s=1.0)
        assert sink.value(metrics.REQUESTS_RUNNING, MODEL) == 2

    def test_what_alarms_watch_begins_at_zero(self, sink: InMemorySink, counted: RequestMetrics) -> None:
        assert {one["outcome"] for one in sink.label_sets(metrics.REQUESTS_FINISHED)} >= {
            "completed",
            "EngineUnavailable",
            "InternalError",
        }
        assert sink.label_sets(metrics.SEQUENCES_LOST) == [MODEL]

    async def test_a_lost_engine_is_among_the_last_errors(self, sink: InMemorySink) -> None:
        errors = RecentErrors(LoopTime())
        counted = RequestMetrics(sink, model="m", router="r0", errors=errors)
        counted.engine_lost(replica_id="e1", failed_sequences=3)
        (error,) = errors.latest_first()
        assert error.text == "engine e1 was lost with 3 sequences of this router"

    def test_engines_that_come_and_go(self, sink: InMemorySink, counted: RequestMetrics) -> None:
        counted.engine_connected(replica_id="r1")
        counted.engine_lost(replica_id="r1", failed_sequences=3)
        counted.sequences_moved(count=2)
        names = (metrics.ENGINE_CONNECTS, metrics.ENGINE_LOSSES, metrics.SEQUENCES_LOST, metrics.SEQUENCES_MOVED)
        assert [sink.value(one, MODEL) for one in names] == [1, 1, 3, 2]
