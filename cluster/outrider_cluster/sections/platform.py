"""The sections of what everything runs on and reports to: `ray`, `telemetry`."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic import model_validator as validator

from outrider_cluster.sections.base import Section

__all__ = ["RaySettings", "TelemetrySettings"]


class RaySettings(Section):
    """The Ray cluster."""

    address: str | None = None
    """Cluster to join (`auto` or host:port); null starts one in this process, and ends it with it."""
    num_cpus: PositiveInt | None = None
    """Logical CPUs of a cluster that is started here; default: what the settings need."""
    num_gpus: NonNegativeInt | None = None
    """Logical GPUs of a cluster that is started here; default: what Ray finds."""
    dashboard: bool = False
    """Serve Ray's dashboard on the loopback."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Prometheus port of a cluster that is started here; 0 takes a free one, which `outrider serve` names."""
    health_check_period_s: PositiveFloat = 2.0
    """How often Serve asks every replica."""
    health_check_timeout_s: PositiveFloat = 10.0
    """A replica that leaves the question open this long is replaced."""
    graceful_shutdown_s: PositiveFloat = 10.0
    """How long a leaving replica may finish what it runs."""


class TelemetrySettings(Section):
    """Where spans and logs go, and what they hold. Metrics are always on Ray's Prometheus port."""

    exporter: Literal["none", "console", "otlp"] = "none"
    endpoint: str | None = None
    """OTLP over gRPC: host:port in plain text, https://host:port with TLS."""
    sampling_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the traces that begin here; one that a client began keeps the client's decision."""
    step_interval: PositiveInt = 16
    """While a traced sequence runs, one engine step in so many is recorded, and what each row did in it."""
    record_text: bool = False
    """Put what clients ask into traces. Whoever can read traces can then read prompts."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Of the service's own loggers, in every process."""
    log_format: Literal["json", "text"] = "json"
    """One JSON object a line, or a line to be read by eye."""

    @validator(mode="after")
    def _endpoint(self) -> "TelemetrySettings":
        if (self.exporter == "otlp") != (self.endpoint is not None):
            raise ValueError("endpoint belongs to exporter otlp, which needs one")
        return self
