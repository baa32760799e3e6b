"""Tracing as configured: one provider per process, or none."""

import sys
from enum import Enum

from opentelemetry.sdk.trace import TracerProvider

from outrider.telemetry.draft_spans import DraftTracer
from outrider.telemetry.request_spans import RequestTracer
from outrider.telemetry.sequence_spans import SequenceTracer
from outrider.telemetry.tracing import SpanExport, TracingConfig, tracer_provider
from outrider_cluster.sections import TelemetrySettings

__all__ = ["Role", "draft_tracer", "provider_for", "request_tracer", "sequence_tracer"]


class Role(Enum):
    """What a process does, as traces name it."""

    ROUTER = "outrider-router"
    TARGET = "outrider-target"
    DRAFT = "outrider-draft"


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


def sequence_tracer(
    provider: TracerProvider | None, telemetry: TelemetrySettings, engine_id: str
) -> SequenceTracer | None:
    """The engine's spans; None without a provider."""
    if provider is None:
        return None
    return SequenceTracer(provider, engine_id=engine_id, step_interval=telemetry.step_interval)


def draft_tracer(provider: TracerProvider | None, telemetry: TelemetrySettings) -> DraftTracer | None:
    """The draft's spans; None without a provider."""
    return None if provider is None else DraftTracer(provider, interval=telemetry.step_interval)
