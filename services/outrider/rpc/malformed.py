"""Bytes that are no message become INVALID_ARGUMENT, where grpc itself would answer UNKNOWN.

grpc calls a method's deserializer before the method, and what it raises there ends the call without
a word. So the deserializer returns what it could not read, and whoever takes the message raises.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from outrider.core.errors import ProtocolError

__all__ = ["Malformed", "MalformedMessages", "ReadingServer", "malformed_error", "refuse_malformed"]


if TYPE_CHECKING:
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor


class Malformed:
    """Stands for a message that could not be read. Travels between Ray's processes as it is."""


def malformed_error() -> ProtocolError:
    """What the sender is told."""
    return ProtocolError("request: is not a protobuf message of this method")


def refuse_malformed(message: object) -> None:
    """Raise `ProtocolError` for what could not be read."""
    if isinstance(message, Malformed):
        raise malformed_error()


class MalformedMessages(_Interceptor):
    """Hands the methods of a server what could not be read; they have to call `refuse_malformed`."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, with another way to read."""
        handler: Any = await continuation(handler_call_details)
        method = None if handler is None else _method(handler)
        # Only methods written in this package know what a `Malformed` is.
        if method is None or not method.__module__.startswith("outrider."):
            return handler
        return _reading(handler)


class ReadingServer:
    """Stands before a server while services are added to it, and changes how their methods read."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Add the handlers of a service."""
        for one in handlers:
            one._method_handlers = _all_reading(one._method_handlers)
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, handlers: Mapping[str, Any]) -> None:
        """Add them by grpc's newer way."""
        self._server.add_registered_method_handlers(service_name, _all_reading(handlers))


def _all_reading(handlers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _reading(one) for name, one in handlers.items()}


def _method(handler: Any) -> Any:
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def _reading(handler: Any) -> Any:
    deserialize = handler.request_deserializer

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return Malformed()

    return handler._replace(request_deserializer=read)
