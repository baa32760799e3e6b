"""What the router counts, over a `MetricSink`. Implements `outrider.router.metrics.RouterMetrics`."""

from collections.abc import Collection

from outrider.core.generation import ChoiceEnd
from outrider.telemetry import metrics
from outrider.telemetry.metrics import Metric
from outrider.telemetry.recent_errors import RecentErrors
from outrider.telemetry.sink import MetricSink

__all__ = ["OTHER_CLASS", "RequestMetrics", "time_per_output_token"]

OTHER_CLASS = "other"
"""Label of every traffic class that the operator has not named."""


def time_per_output_token(*, total_s: float, first_token_s: float, num_tokens: int) -> float | None:
    """TPOT = (E2E - TTFT) / (n - 1), seconds; None for fewer than two tokens, where it has no meaning."""
    return (total_s - first_token_s) / (num_tokens - 1) if num_tokens >= 2 else None


_SERVER_ERRORS = ("DeadlineExceeded", "EngineUnavailable", "InternalError", "Overloaded")
_OUTCOMES = ("completed", "abandoned", *_SERVER_ERRORS)


class RequestMetrics:
    """Called on the router's event loop; never blocks. Not thread-safe.

    Streamed tokens are summed here and handed to the sink when a request ends or `flush` is called
    (about once a second): one call per token message would cost more than the message.
    """

    def __init__(
        self,
        sink: MetricSink,
        *,
        model: str,
        router: str,
        traffic_classes: Collection[str] = (),
        errors: RecentErrors | None = None,
    ) -> None:
        """`router`: name of this replica. `errors`: told of lost engines, for the status.
        `traffic_classes` get series of their own.

        Clients write the class as they like, so any other is counted as `OTHER_CLASS`; otherwise a
        client could create series without end.
        """
        self._sink = sink
        self._labels = {"model_name": model, "router": router}
        self._classes = frozenset(traffic_classes)
        self._unsent_tokens: dict[str, int] = {}
        self._running = 0
        self._errors = errors
        self._begin_at_zero()

    def request_started(self, *, traffic_class: str, prompt_tokens: int) -> None:
        """A request was handed to an engine."""
        label = self._class(traffic_class)
        self._running += 1
        self._add(metrics.REQUESTS_STARTED, 1, traffic_class=label)
        self._add(metrics.PROMPT_TOKENS, prompt_tokens, traffic_class=label)

    def request_refused(self, *, error: str) -> None:
        """A request was refused before it ran. `error`: name of the error class."""
        self._add(metrics.REQUESTS_REFUSED, 1, error=error)

    def first_token(self, *, traffic_class: str, after_s: float) -> None:
        """The first token of a request, seconds after its arrival at the router."""
        self._observe(metrics.TIME_TO_FIRST_TOKEN, after_s, traffic_class=self._class(traffic_class))

    def tokens_streamed(self, *, traffic_class: str, count: int) -> None:
        """Committed tokens were handed to a client."""
        label = self._class(traffic_class)
        self._unsent_tokens[label] = self._unsent_tokens.get(label, 0) + count

    def choice_finished(self, *, traffic_class: str, end: ChoiceEnd) -> None:
        """A choice ended without an error. Its TPOT comes from the engine's own times."""
        label = self._class(traffic_class)
        self._add(metrics.CHOICES_FINISHED, 1, traffic_class=label, finish_reason=end.finish.reason.value)
        self._add(metrics.CACHED_PROMPT_TOKENS, end.usage.cached_prompt_tokens, traffic_class=label)
        tpot_s = time_per_output_token(
            total_s=end.timings.total_s,
            first_token_s=end.timings.first_token_s,
            num_tokens=end.usage.completion_tokens,
        )
        if tpot_s is not None:
            self._observe(metrics.TIME_PER_OUTPUT_TOKEN, tpot_s, traffic_class=label)
        self._observe(metrics.QUEUE_TIME, end.timings.queue_s, traffic_class=label)
        self._observe(metrics.PREFILL_TIME, end.timings.prefill_s, traffic_class=label)

    def request_finished(self, *, traffic_class: str, outcome: str, after_s: float) -> None:
        """A started request ended. `outcome`: "completed", "abandoned", "InternalError" or an error class's name."""
        label = self._class(traffic_class)
        self._running -= 1
        self._add(metrics.REQUESTS_FINISHED, 1, traffic_class=label, outcome=outcome)
        self._observe(metrics.REQUEST_DURATION, after_s, traffic_class=label, outcome=outcome)
        self.flush()

    def engine_connected(self, *, replica_id: str) -> None:
        """A session was opened. Replicas come and go without end, so their ids are for the log."""
        self._add(metrics.ENGINE_CONNECTS, 1)

    def engine_lost(self, *, replica_id: str, failed_sequences: int) -> None:
        """A session broke, with that many sequences of this router on it."""
        if self._errors is not None:
            self._errors.add(f"engine {replica_id} was lost with {failed_sequences} sequences of this router")
        self._add(metrics.ENGINE_LOSSES, 1)
        self._add(metrics.SEQUENCES_LOST, failed_sequences)

    def sequences_moved(self, *, count: int) -> None:
        """Sequences of a lost engine went on on another one."""
        self._add(metrics.SEQUENCES_MOVED, count)

    def flush(self) -> None:
        """Hand the tokens streamed so far, and the requests that run, to the sink."""
        unsent, self._unsent_tokens = self._unsent_tokens, {}
        for label, count in unsent.items():
            self._add(metrics.OUTPUT_TOKENS, count, traffic_class=label)
        self._sink.set(metrics.REQUESTS_RUNNING, self._running, self._labels)

    def _begin_at_zero(self) -> None:
        """Counters that alarms watch: a series that begins at 1 hides its first event from every rate."""
        for label in (*sorted(self._classes), OTHER_CLASS):
            self._add(metrics.REQUESTS_STARTED, 0, traffic_class=label)
            for outcome in _OUTCOMES:
                self._add(metrics.REQUESTS_FINISHED, 0, traffic_class=label, outcome=outcome)
        for error in _SERVER_ERRORS:
            self._add(metrics.REQUESTS_REFUSED, 0, error=error)
        for metric in (metrics.ENGINE_CONNECTS, metrics.ENGINE_LOSSES, metrics.SEQUENCES_LOST, metrics.SEQUENCES_MOVED):
            self._add(metric, 0)

    def _class(self, traffic_class: str) -> str:
        return traffic_class if traffic_class in self._classes else OTHER_CLASS

    def _add(self, metric: Metric, value: float, **labels: str) -> None:
        self._sink.add(metric, value, {**self._labels, **labels})

    def _observe(self, metric: Metric, value: float, **labels: str) -> None:
        self._sink.observe(metric, value, {**self._labels, **labels})
