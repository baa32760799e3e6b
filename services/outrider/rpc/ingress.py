"""What Ray Serve's gRPC proxies import to know the public services: names in Serve's configuration.

Like the generated functions, but bytes that are no message reach the router, which answers them.
"""

from typing import Any

from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from outrider.rpc.malformed import ReadingServer
from outrider.v1.generation_pb2_grpc import (
    add_GenerationServiceServicer_to_server,
    add_ModelServiceServicer_to_server,
)

__all__ = ["add_generation_service", "add_health_service", "add_model_service"]


def add_generation_service(servicer: Any, server: Any) -> None:
    """Add `outrider.v1.GenerationService` to a proxy's server."""
    add_GenerationServiceServicer_to_server(servicer, ReadingServer(server))  # type: ignore[arg-type]


def add_model_service(servicer: Any, server: Any) -> None:
    """Add `outrider.v1.ModelService` to a proxy's server."""
    add_ModelServiceServicer_to_server(servicer, ReadingServer(server))  # type: ignore[arg-type]


def add_health_service(servicer: Any, server: Any) -> None:
    """Add `grpc.health.v1.Health` to a proxy's server."""
    add_HealthServicer_to_server(servicer, ReadingServer(server))
