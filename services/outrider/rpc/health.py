"""grpc.health.v1: the state of services, for a grpc.aio server or as methods of a Ray Serve class."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from outrider.rpc.errors import StatusContext, fail
from outrider.rpc.malformed import Malformed, malformed_error

__all__ = ["HEALTH_SERVICE", "Health", "HealthServicer", "add_health"]

HEALTH_SERVICE = "grpc.health.v1.Health"
_MAX_NAME_CHARS = 100  # of an unknown service, in an answer that anybody may ask for

_SERVING = pb.HealthCheckResponse.SERVING
_NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING
_UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """Which services are serving. Event loop only. The empty name stands for the whole server."""

    def __init__(self, services: Iterable[str]) -> None:
        self._serving = {"": False} | dict.fromkeys(services, False)
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Change the state of the server and all its services; watchers learn of it."""
        if any(state != serving for state in self._serving.values()):
            self._serving = dict.fromkeys(self._serving, serving)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def check(self, request: pb.HealthCheckRequest, context: StatusContext) -> pb.HealthCheckResponse:
        """Health/Check: the state now; NOT_FOUND for a service that is not here."""
        state = self._state(request.service)
        if state == _UNKNOWN:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details(f"service: {request.service[:_MAX_NAME_CHARS]!r} is not served here")
        return pb.HealthCheckResponse(status=state)

    async def list_services(self) -> pb.HealthListResponse:
        """Health/List: every service and its state."""
        states = {name: pb.HealthCheckResponse(status=self._state(name)) for name in self._serving}
        return pb.HealthListResponse(statuses=states)

    async def watch(self, request: pb.HealthCheckRequest) -> AsyncGenerator[pb.HealthCheckResponse, None]:
        """Health/Watch: the state now and after each change, without end."""
        told: int | None = None
        while True:
            changed, state = self._changed, self._state(request.service)
            if state != told:
                told = state
                yield pb.HealthCheckResponse(status=state)
            await changed.wait()

    def _state(self, service: str) -> pb.HealthCheckResponse.ServingStatus.ValueType:
        serving = self._serving.get(service)
        if serving is None:
            return _UNKNOWN
        return _SERVING if serving else _NOT_SERVING


class HealthServicer:
    """The service on a grpc.aio server."""

    def __init__(self, health: Health) -> None:
        self._health = health

    async def Check(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        """The state now."""
        if isinstance(request, Malformed):
            fail(context, malformed_error())
            return pb.HealthCheckResponse()
        return await self._health.check(request, context)

    async def List(self, request: pb.HealthListRequest, context: Any) -> pb.HealthListResponse:
        """Every service and its state."""
        if isinstance(request, Malformed):
            fail(context, malformed_error())
            return pb.HealthListResponse()
        return await self._health.list_services()

    async def Watch(self, request: pb.HealthCheckRequest, context: Any) -> None:
        """The state now and after each change."""
        if isinstance(request, Malformed):
            fail(context, malformed_error())
            return
        async with aclosing(self._health.watch(request)) as responses:
            async for response in responses:
                await context.write(response)


def add_health(server: grpc.aio.Server, health: Health) -> None:
    """Add the service to a server."""
    add_HealthServicer_to_server(HealthServicer(health), server)
