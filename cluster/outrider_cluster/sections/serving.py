"""The sections of the ways in and between: `router`, `grpc`, `http`, `data_plane`."""

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from outrider_cluster.sections.base import Port, Scaled, Section
from outrider_cluster.sections.security import TlsSettings

__all__ = ["DataPlaneSettings", "HttpSettings", "PortSettings", "RouterSettings"]


class RouterSettings(Scaled):
    """The public ingress: admission and dispatch."""

    max_surge_percent: int = Field(default=100, ge=0, le=100)
    """As for other deployments; a router is cheap, and without one nobody is served."""

    max_running_requests: PositiveInt = 256
    """Most requests that one router holds open; more are refused with RESOURCE_EXHAUSTED."""
    max_running_requests_per_key: PositiveInt = 256
    """The same for one API key, so that no caller takes the whole router."""
    max_running_tokens: PositiveInt = 8_000_000
    """Prompt and possible output tokens of all that is open."""
    default_timeout_s: PositiveFloat = 600.0
    """Time limit of a request that names none."""
    max_timeout_s: PositiveFloat = 3600.0
    """Longest time limit that a request may name."""
    failover_wait_s: PositiveFloat = 60.0
    """How long a stream that has lost its engine waits for one that is being rebuilt, or for room on
    a full one. Where none is to be expected, it ends within seconds."""
    directory_interval_s: PositiveFloat = 1.0
    """How often the replicas are looked up."""
    directory_timeout_s: PositiveFloat = 3.0
    """How long such a look-up may take; the last view stays in force."""
    max_replicas_per_node: int | None = Field(default=None, ge=1, le=100)
    """Most routers on one node; null: Serve spreads them as it can, and may put all of them on one."""
    num_cpus: NonNegativeFloat = 0.1


class PortSettings(Section):
    """A listening port of Serve's proxy."""

    port: Port = 0
    """0: a free one is chosen and reported."""


class HttpSettings(PortSettings):
    """The OpenAI-compatible door, on the HTTP port of Serve's proxy."""

    enabled: bool = True
    """false: the port answers 404 to everything but Serve's own health route."""
    host: str | None = None
    """Address to bind; default: the loopback for a cluster that is started here, else every interface."""
    max_body_mib: PositiveFloat = 16.0
    """Largest request body, in MiB; larger ones are refused with 413 before they are read."""


class DataPlaneSettings(Section):
    """The gRPC streams between routers, rank 0 and drafts."""

    host: str | None = None
    """Address to bind and publish; default: the node's address in the Ray cluster."""
    tls: TlsSettings | None = None
    """null: plain text, with the shared secret OUTRIDER_AUTH_TOKEN as the only check of a peer."""
