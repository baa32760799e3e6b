"""OpenTelemetry without global state: a provider of our own, and W3C trace context as strings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TextIO

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
    SpanExporter,
)
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind, TraceState, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from outrider.core.errors import ConfigError

__all__ = [
    "STEP_SPAN",
    "SpanExport",
    "TracingConfig",
    "is_unsampled",
    "parent_context",
    "traceparent_of",
    "tracer_provider",
]

STEP_SPAN = "outrider.engine.step"
"""Begins a trace of its own, and was chosen by the sequences that it serves."""

_HEADER = "traceparent"
# Given in full, since the SDK would otherwise take them from the environment.
_QUEUE_SPANS = 4096
_BATCH_SPANS = 512
_DELAY_MS = 1000.0
_EXPORT_TIMEOUT_S = 10.0


class SpanExport(Enum):
    """Where spans go."""

    NONE = "none"
    CONSOLE = "console"
    OTLP = "otlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Tracing of one process. Raises `ConfigError` naming the field."""

    service_name: str
    """Role of the process: outrider-router, outrider-target, outrider-draft."""
    instance_id: str
    """Name of the replica or rank."""
    export: SpanExport = SpanExport.NONE
    endpoint: str | None = None
    """OTLP over gRPC: host:port in plain text, https://host:port with TLS. For OTLP only."""
    sampling_ratio: float = 1.0
    """Share of the traces that begin here; one that a client began keeps the client's decision."""

    def __post_init__(self) -> None:
        if (self.export is SpanExport.OTLP) != (self.endpoint is not None):
            raise ConfigError("endpoint: belongs to exporter otlp, which needs one")
        if math.isnan(self.sampling_ratio) or not 0 <= self.sampling_ratio <= 1:
            raise ConfigError(f"sampling_ratio: {self.sampling_ratio} is outside [0, 1]")

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere; if not, the null objects of `spans` do."""
        return self.export is not SpanExport.NONE


def tracer_provider(
    config: TracingConfig, *, console: TextIO | None = None, exporter: SpanExporter | None = None
) -> TracerProvider:
    """A provider that no global refers to; its owner calls `shutdown`, which sends what is left.

    `console`: stream for the console exporter. `exporter`: gets every span at once, besides what
    the configuration asks for (tests). Raises `ConfigError` when the OTLP exporter is not
    installed or no stream was given for the console.
    """
    provider = TracerProvider(
        sampler=_Sampler(config.sampling_ratio),
        resource=Resource({"service.name": config.service_name, "service.instance.id": config.instance_id}),
        shutdown_on_exit=False,
    )
    if config.export is SpanExport.CONSOLE:
        if console is None:
            raise ConfigError("exporter: console needs a stream")
        provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=console)))
    if config.endpoint is not None:
        provider.add_span_processor(
            BatchSpanProcessor(
                _otlp_exporter(config.endpoint),
                max_queue_size=_QUEUE_SPANS,
                schedule_delay_millis=_DELAY_MS,
                max_export_batch_size=_BATCH_SPANS,
                export_timeout_millis=_EXPORT_TIMEOUT_S * 1000,
            )
        )
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def is_unsampled(traceparent: str) -> bool:
    """Whether it says, in the form of today, that its trace is not recorded: nothing below it has to be made."""
    return traceparent.startswith("00-") and traceparent.endswith("-00")


def parent_context(traceparent: str) -> Context:
    """The context that a traceparent names; an empty one, and so a new trace, if it is not valid."""
    return TraceContextTextMapPropagator().extract({_HEADER: traceparent}, context=Context())


def traceparent_of(span: Span) -> str:
    """The traceparent that makes other spans children of this one; empty for a span without ids."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context=set_span_in_context(span, Context()))
    return carrier.get(_HEADER, "")


def _otlp_exporter(endpoint: str) -> SpanExporter:
    """Imported here: it brings a gRPC client, which nobody needs without a collector."""
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            "exporter: otlp needs the package opentelemetry-exporter-otlp-proto-grpc, which is not installed"
        ) from error
    return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=_EXPORT_TIMEOUT_S)


class _Sampler(Sampler):
    """The parent decides, else the ratio. Steps that were asked for are always recorded."""

    def __init__(self, ratio: float) -> None:
        self._usual = ParentBased(TraceIdRatioBased(ratio))

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if name == STEP_SPAN:
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)
        return self._usual.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return "parent, else ratio; chosen steps always"
