"""Tracing as configured: one provider per process, or none."""

import sys
from enum import Enum

from opentelemetry.sdk.trace import TracerProvider

from outrider.telemetry.tracing import SpanExport, TracingConfig, tracer_provider
from outrider_cluster.sections import TelemetrySettings

__all__ = ["Role", "provider_for"]


class Role(Enum):
    """What a process does, as traces name it."""

    ROUTER = "outrider-router"
    TARGET = "outrider-target"


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
