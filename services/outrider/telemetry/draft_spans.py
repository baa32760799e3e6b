"""The draft's spans: of the sequences that it holds, and of some blocks and tables. Never any text."""

from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, TracerProvider, set_span_in_context

from outrider.telemetry.tracing import is_unsampled, parent_context

__all__ = ["DraftTracer"]


@dataclass(slots=True)
class _Held:
    """A traced sequence, and what was sent for it."""

    span: Span
    sent: int = 0


class DraftTracer:
    """Implements `DraftSpans` on a tracer provider. An unsampled sequence costs nothing."""

    def __init__(self, provider: TracerProvider, *, interval: int = 16) -> None:
        """`interval`: of what is sent for a traced sequence, one in so many has a span of its own."""
        self._tracer = provider.get_tracer("outrider.draft")
        self._interval = interval
        self._held: dict[int, _Held] = {}

    def opened(self, key: int, traceparent: str, *, num_tokens: int) -> None:
        """Begin the span of a sequence under that of the target's."""
        if not traceparent or is_unsampled(traceparent):
            return
        span = self._tracer.start_span(
            "outrider.draft.sequence",
            context=parent_context(traceparent),
            kind=SpanKind.SERVER,
            attributes={"outrider.draft.opening_tokens": num_tokens},
        )
        if span.is_recording():
            self._held[key] = _Held(span)

    def drafted(self, key: int, *, what: str, size: int) -> None:
        """Count a block or a table, and mark some of them."""
        held = self._held.get(key)
        if held is None:
            return
        held.sent += 1
        if (held.sent - 1) % self._interval == 0:
            self._tracer.start_span(
                "draft",
                context=set_span_in_context(held.span, Context()),
                attributes={"outrider.draft.what": what, "outrider.draft.size": size},
            ).end()

    def closed(self, key: int) -> None:
        """End the span of a sequence."""
        held = self._held.pop(key, None)
        if held is not None:
            held.span.set_attribute("outrider.draft.sent", held.sent)
            held.span.end()
