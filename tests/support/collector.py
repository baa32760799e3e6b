"""An OpenTelemetry collector of the test's own: OTLP over gRPC on the loopback, spans kept in memory."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc

__all__ = ["CollectedSpan", "Collector", "running_collector"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedSpan:
    """One span as it arrived."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: none."""
    links: tuple[str, ...]
    """Ids of the spans that it links to."""
    attributes: dict[str, Any]


@dataclass(slots=True)
class Collector:
    """What has arrived so far. Thread-safe."""

    address: str
    raw: list[bytes] = field(default_factory=list)
    """Every message, for searching."""
    _spans: list[CollectedSpan] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def spans(self) -> list[CollectedSpan]:
        """A copy."""
        with self._lock:
            return list(self._spans)

    def take(self, request: pb.ExportTraceServiceRequest) -> None:
        """Keep the spans of one message."""
        with self._lock:
            self.raw.append(request.SerializeToString())
            for resource in request.resource_spans:
                of = {one.key: one.value.string_value for one in resource.resource.attributes}
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    self._spans.append(
                        CollectedSpan(
                            name=span.name,
                            service=of.get("service.name", ""),
                            instance=of.get("service.instance.id", ""),
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            links=tuple(link.span_id.hex() for link in span.links),
                            attributes={one.key: _value(one.value) for one in span.attributes},
                        )
                    )


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


class _Servicer(rpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> pb.ExportTraceServiceResponse:
        self._collector.take(request)
        return pb.ExportTraceServiceResponse()


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """A server on a port of the system's choice."""
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    collector = Collector(f"127.0.0.1:{port}")
    rpc.add_TraceServiceServicer_to_server(_Servicer(collector), server)  # type: ignore[no-untyped-call]
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
