"""Traces and logs as configured: one tracer provider per process, or none; logs always."""

import sys
from enum import Enum

from opentelemetry.sdk.trace import TracerProvider

from outrider.telemetry import logs
from outrider.telemetry.draft_spans import DraftTracer
from outrider.telemetry.request_spans import RequestTracer
from outrider.telemetry.sequence_log import SequenceLog
from outrider.telemetry.sequence_spans import SequenceTracer
from outrider.telemetry.spans import NullSequenceSpans, SequenceSpans
from outrider.telemetry.tracing import SpanExport, TracingConfig, tracer_provider
from outrider_cluster.sections import TelemetrySettings

__all__ = ["Role", "configure_logs", "draft_tracer", "provider_for", "request_tracer", "sequence_observer"]


class Role(Enum):
    """What a process does, as traces name it."""

    ROUTER = "outrider-router"
    FRONT = "outrider-front"
    TARGET = "outrider-target"
    DRAFT = "outrider-draft"


def configure_logs(telemetry: TelemetrySettings, role: Role, instance_id: str) -> None:
    """Send this process's logs to standard error, which Ray collects."""
    logs.configure(
        telemetry.log_level,
        sys.stderr,
        as_text=telemetry.log_format == "text",
        process={"service": role.value, "instance": instance_id},
    )


def provider_for(telemetry: TelemetrySettings, role: Role, instance_id: str) -> TracerProvider | None:
    """The process's tracer provider; None when spans go nowhere. Its owner calls `shutdown`.

    Console spans go to standard error, which Ray collects. Raises `ConfigError`.
    """
    config = TracingConfig(
        service_name=role.value,
        instance_id=instance_id,
        export=SpanExport(telemetry.exporter),
        endpoint=telemetry.endpoint,
        sampling_ratio=telemetry.sampling_ratio,
    )
    return tracer_provider(config, console=sys.stderr) if config.enabled else None


def request_tracer(provider: TracerProvider | None, telemetry: TelemetrySettings) -> RequestTracer | None:
    """The router's spans; None without a provider."""
    return None if provider is None else RequestTracer(provider, record_text=telemetry.record_text)


def sequence_observer(provider: TracerProvider | None, telemetry: TelemetrySettings, engine_id: str) -> SequenceSpans:
    """The engine's log of sequences, and their spans where there is a provider."""
    spans: SequenceSpans = NullSequenceSpans()
    if provider is not None:
        spans = SequenceTracer(provider, engine_id=engine_id, step_interval=telemetry.step_interval)
    return SequenceLog(spans, engine_id)


def draft_tracer(provider: TracerProvider | None, telemetry: TelemetrySettings) -> DraftTracer | None:
    """The draft's spans; None without a provider."""
    return None if provider is None else DraftTracer(provider, interval=telemetry.step_interval)
