"""The router's spans: one per request, with tokenization inside. Text only where it was opted into."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, TracerProvider, set_span_in_context

from outrider.core.generation import GenerationRequest
from outrider.telemetry.spans import RequestSpan
from outrider.telemetry.tracing import parent_context, traceparent_of

__all__ = ["RequestTracer"]

_NO_ERRORS = ("completed", "abandoned")


class RequestTracer:
    """Implements `RequestSpans` on a tracer provider."""

    def __init__(self, provider: TracerProvider, *, record_text: bool = False) -> None:
        """`record_text`: put what clients ask into the spans. Whoever reads traces then reads prompts."""
        self._tracer = provider.get_tracer("outrider.router")
        self._record_text = record_text

    def start(self, *, request_id: str, model: str, traceparent: str) -> RequestSpan:
        """Start the root span: a child of the client's, if the client sent a valid traceparent."""
        span = self._tracer.start_span(
            "outrider.request",
            context=parent_context(traceparent),
            kind=SpanKind.SERVER,
            attributes={"outrider.request_id": request_id, "gen_ai.request.model": model},
        )
        return _RequestSpan(self._tracer, span, record_text=self._record_text)


class _RequestSpan:
    """A running root span."""

    def __init__(self, tracer: Tracer, span: Span, *, record_text: bool) -> None:
        self._tracer = tracer
        self._record_text = record_text
        self._span = span
        self._ended = False

    @property
    def traceparent(self) -> str:
        return traceparent_of(self._span)

    def asked(self, request: GenerationRequest) -> None:
        if self._record_text and self._span.is_recording():
            self._span.set_attribute("gen_ai.input.messages", _input(request))

    @contextmanager
    def tokenizing(self) -> Iterator[None]:
        # Not made current, and no exception event: its message could quote the request.
        span = self._tracer.start_span("tokenize", context=set_span_in_context(self._span, Context()))
        try:
            yield
        except BaseException as error:
            _fail(span, type(error).__name__)
            raise
        finally:
            span.end()

    def end(self, *, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        if self._ended:
            return
        self._ended = True
        self._span.set_attributes(
            {
                "outrider.outcome": outcome,
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.output_tokens": output_tokens,
            }
        )
        if outcome not in _NO_ERRORS:
            _fail(self._span, outcome)
        self._span.end()


def _fail(span: Span, error: str) -> None:
    span.set_attribute("error.type", error)
    span.set_status(StatusCode.ERROR)


def _input(request: GenerationRequest) -> str:
    """What was asked, as JSON: messages with role and content."""
    if request.messages is not None:
        messages = [{"role": one.role, "content": one.content} for one in request.messages]
    else:
        content = request.text if request.text is not None else f"{len(request.token_ids or ())} token ids"
        messages = [{"role": "user", "content": content}]
    return json.dumps(messages, ensure_ascii=False)
