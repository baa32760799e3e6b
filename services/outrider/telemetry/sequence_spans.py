"""The engine's spans: of sequences, of some steps and of what each row did in them. Never any text."""

import time
from collections.abc import Callable
from dataclasses import replace

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, TracerProvider, set_span_in_context
from opentelemetry.util.types import AttributeValue

from outrider.core.dispatch import SequenceEnd, SpeculationOutcome, Timings
from outrider.core.request import SequenceRequest
from outrider.telemetry.spans import StepRecord
from outrider.telemetry.tracing import STEP_SPAN, is_unsampled, parent_context, traceparent_of

__all__ = ["SequenceTracer"]

_NS_PER_S = 1_000_000_000


class SequenceTracer:
    """Implements `SequenceSpans` on a tracer provider.

    The engine measures with a monotonic clock; the wall clock is read once, when a sequence arrives,
    and its stages are laid out from there. A recorded sequence costs a few hundred microseconds of the
    calling thread and a recorded step about a hundred; an unsampled sequence costs nothing.
    """

    def __init__(
        self,
        provider: TracerProvider,
        *,
        engine_id: str = "",
        step_interval: int = 16,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`step_interval`: while a traced sequence runs, one step in so many is recorded.
        `wall_clock_ns`: nanoseconds since 1970, UTC.
        """
        self._tracer = provider.get_tracer("outrider.target")
        self._engine_id = engine_id
        self._step_interval = step_interval
        self._wall_clock_ns = wall_clock_ns
        self._open: dict[str, tuple[Span, int]] = {}  # by traceparent: the span and its start
        self._steps = 0

    def sequence_arrived(self, request: SequenceRequest) -> SequenceRequest:
        """Begin the span of a sequence under the trace of its request."""
        if is_unsampled(request.traceparent):
            return request
        start_ns = self._wall_clock_ns()
        span = self._tracer.start_span(
            "outrider.engine.sequence",
            context=parent_context(request.traceparent),
            kind=SpanKind.SERVER,
            start_time=start_ns,
        )
        own = traceparent_of(span)
        if span.is_recording():
            self._open[own] = (span, start_ns)
        return replace(request, traceparent=own)

    def sequence_ended(self, request: SequenceRequest, end: SequenceEnd) -> None:
        """End the span of a sequence, and record its stages."""
        if request.traceparent not in self._open:
            return
        span, start_ns = self._open.pop(request.traceparent)
        end_ns = start_ns + _ns(end.timings.total_s)
        self._describe(span, request, end)
        if end.speculation.stats.committed:
            span.add_event("first_token", timestamp=start_ns + _ns(end.timings.first_token_s))
        self._add_stages(span, end.timings, start_ns, end_ns)
        span.end(end_time=end_ns)

    def takes_step(self) -> bool:
        """One step in `step_interval` while a traced sequence is here, the first one included."""
        if not self._open:
            return False
        self._steps += 1
        return (self._steps - 1) % self._step_interval == 0

    def step_ended(self, step: StepRecord) -> None:
        """Record a step with a link to the sequence of every traced row, and each such row's round."""
        end_ns = self._wall_clock_ns()
        start_ns = end_ns - _ns(sum(step.seconds.values()))
        traced = [(one, self._open[one.traceparent][0]) for one in step.rounds if one.traceparent in self._open]
        if not traced:
            return
        whole = self._tracer.start_span(
            STEP_SPAN,
            context=Context(),
            links=[Link(sequence.get_span_context()) for _, sequence in traced],
            attributes={
                "outrider.engine_id": self._engine_id,
                "outrider.step.rows": step.num_rows,
                "outrider.step.sequences": len(step.rounds),
                **{f"outrider.step.{phase}_s": seconds for phase, seconds in step.seconds.items()},
            },
            start_time=start_ns,
        )
        for one, sequence in traced:
            self._tracer.start_span(
                "round",
                context=set_span_in_context(sequence, Context()),
                links=[Link(whole.get_span_context())],
                attributes={
                    "outrider.round.first_token_index": one.first_token_index,
                    "outrider.round.draft_tokens": one.num_draft_tokens,
                    "outrider.round.accepted": one.num_accepted,
                    "outrider.round.committed": one.num_committed,
                    "outrider.round.source": one.source,
                },
                start_time=start_ns,
            ).end(end_time=end_ns)
        whole.end(end_time=end_ns)

    def _describe(self, span: Span, request: SequenceRequest, end: SequenceEnd) -> None:
        span.set_attributes(
            {
                "outrider.request_id": request.request_id,
                "outrider.choice_index": request.choice_index,
                "outrider.engine_id": self._engine_id,
                "outrider.resumed_tokens": len(request.resume_token_ids),
                "outrider.cached_prompt_tokens": end.cached_prompt_tokens,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                "gen_ai.usage.output_tokens": end.speculation.stats.committed,
                **_speculation(end.speculation),
            }
        )
        if end.finish is not None:
            span.set_attribute("gen_ai.response.finish_reasons", (end.finish.reason.value,))
        if end.failure is not None:
            # The message is for the log: only the code is sure to quote nothing.
            span.set_attribute("error.type", end.failure.code.value)
            span.set_status(StatusCode.ERROR)

    def _add_stages(self, sequence: Span, timings: Timings, start_ns: int, end_ns: int) -> None:
        """The three stages, end to end; one that was never reached is left out."""
        admitted_ns = min(start_ns + _ns(timings.queue_s), end_ns)
        prefilled_ns = min(admitted_ns + _ns(timings.prefill_s), end_ns)
        stages = (("queue", start_ns, admitted_ns), ("prefill", admitted_ns, prefilled_ns))
        parent = set_span_in_context(sequence, Context())
        for name, begins_ns, ends_ns in (*stages, ("decode", prefilled_ns, end_ns)):
            if ends_ns > begins_ns:
                self._tracer.start_span(name, context=parent, start_time=begins_ns).end(end_time=ends_ns)


def _speculation(outcome: SpeculationOutcome) -> dict[str, AttributeValue]:
    """Mode, reason and raw counters."""
    stats = outcome.stats
    counters = (
        "rounds",
        "speculative_rounds",
        "drafted",
        "verified",
        "accepted",
        "cut",
        "committed",
        "late",
        "stale",
        "late_laws",
        "cached_hits",
        "cached_lookups",
        "forward_rows",
    )
    attributes: dict[str, AttributeValue] = {
        "outrider.speculation.mode": outcome.mode.value,
        "outrider.speculation.reason": outcome.reason.value,
        "outrider.speculation.accepted_per_position": tuple(stats.accepted_per_position),
        "outrider.speculation.verified_per_position": tuple(stats.verified_per_position),
        **{f"outrider.speculation.{name}": getattr(stats, name) for name in counters},
    }
    if outcome.estimated_speedup is not None:
        attributes["outrider.speculation.estimated_speedup"] = outcome.estimated_speedup
    return attributes


def _ns(seconds: float) -> int:
    return round(seconds * _NS_PER_S)
