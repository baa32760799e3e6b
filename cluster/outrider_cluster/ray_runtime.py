"""Start or join a Ray cluster and Serve, and leave nothing behind.

The caller has called `settings.prepare_environment` before this module is imported: Ray reads some
of its variables when it is imported.
"""

import contextlib
import logging
import math
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation, gRPCOptions

from outrider.core.errors import ConfigError
from outrider_cluster.node import own_address
from outrider_cluster.placement import resources_needed
from outrider_cluster.settings import Settings
from outrider_cluster.stopping import StopSignals

__all__ = ["SERVICER_FUNCTIONS", "Ingress", "running_serve"]

SERVICER_FUNCTIONS = (
    "outrider.rpc.ingress.add_generation_service",
    "outrider.rpc.ingress.add_model_service",
    "outrider.rpc.ingress.add_health_service",
)
"""What Serve's gRPC proxy accepts; the router implements all of it."""

_LOOPBACK = "127.0.0.1"
_EVERYWHERE = "0.0.0.0"
# No tensors travel through Ray's object store.
_OBJECT_STORE_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingress:
    """Where clients connect."""

    grpc_address: str
    http_address: str | None
    """None: the HTTP door is not enabled."""
    metrics_addresses: tuple[str, ...] = ()
    """Prometheus ports of the nodes that were there at the start."""


@contextlib.contextmanager
def running_serve(settings: Settings, signals: StopSignals | None = None) -> Iterator[Ingress]:
    """A Ray cluster with Serve and its proxies, for the duration of the block.

    A cluster that was started here ends with the block, with every process; one that was joined
    stays. `signals`: the caller's, held back while Ray starts, because an interrupted start leaves
    processes behind. Raises `ConfigError` when a fixed port is taken.
    """
    with contextlib.ExitStack() as stack:
        grpc_port = stack.enter_context(_reserved_port(settings.grpc.port, "grpc.port"))
        http_port = stack.enter_context(_reserved_port(settings.http.port, "http.port"))
        stack.enter_context(_cluster(settings, signals))
        local = settings.ray.address is None
        http_host = settings.http.host or (_LOOPBACK if local else _EVERYWHERE)
        serve.start(
            proxy_location=ProxyLocation.HeadOnly if local else ProxyLocation.EveryNode,
            http_options=HTTPOptions(host=http_host, port=http_port),
            grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=list(SERVICER_FUNCTIONS)),
        )
        host = _LOOPBACK if local else own_address()
        reached_at = host if http_host == _EVERYWHERE else http_host
        yield Ingress(
            grpc_address=f"{host}:{grpc_port}",
            http_address=f"{reached_at}:{http_port}" if settings.http.enabled else None,
            metrics_addresses=_metrics_addresses(),
        )


@contextlib.contextmanager
def _cluster(settings: Settings, signals: StopSignals | None) -> Iterator[None]:
    try:
        with contextlib.nullcontext() if signals is None else signals.deferred():
            _init(settings)
        yield
    finally:
        ray.shutdown()


def _init(settings: Settings) -> None:
    # A command says itself what it is doing; of Ray's own words, warnings are for its user. This process only.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    options = settings.ray
    if options.address is not None:
        ray.init(address=options.address, log_to_driver=False, logging_level=logging.WARNING)
        return
    ray.init(
        address="local",
        num_cpus=options.num_cpus or math.ceil(resources_needed(settings).cpus),
        num_gpus=options.num_gpus,
        include_dashboard=options.dashboard,
        dashboard_host=_LOOPBACK,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.WARNING,
        _metrics_export_port=options.metrics_port or None,
    )


def _metrics_addresses() -> tuple[str, ...]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return tuple(f"{one['NodeManagerAddress']}:{one['MetricsExportPort']}" for one in nodes if one["Alive"])


@contextlib.contextmanager
def _reserved_port(port: int, field: str) -> Iterator[int]:
    """A port that nobody else gets until Serve's proxy, which binds with SO_REUSEPORT, listens on it.

    The socket is bound and never listens, so no connection reaches it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        if port:
            _refuse_taken(port, field)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("", port))
        yield holder.getsockname()[1]


def _refuse_taken(port: int, field: str) -> None:
    # Without SO_REUSEPORT: two deployments must not share a port and split its connections.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(f"{field}: {port} cannot be used: {error.strerror}") from error
