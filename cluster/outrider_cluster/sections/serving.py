"""The sections of the ways in and between: `router`, `ports`, `data_plane`."""

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from outrider_cluster.sections.base import Port, Scaled, Section

__all__ = ["DataPlaneSettings", "PortSettings", "RouterSettings"]


class RouterSettings(Scaled):
    """The public ingress: admission and dispatch."""

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
    directory_interval_s: PositiveFloat = 1.0
    """How often the replicas are looked up."""
    directory_timeout_s: PositiveFloat = 3.0
    """How long such a look-up may take; the last view stays in force."""
    num_cpus: NonNegativeFloat = 0.1


class PortSettings(Section):
    """A listening port of Serve's proxy."""

    port: Port = 0
    """0: a free one is chosen and reported."""


class DataPlaneSettings(Section):
    """The gRPC streams between routers, rank 0 and drafts."""

    host: str | None = None
    """Address to bind and publish; default: the node's address in the Ray cluster."""
