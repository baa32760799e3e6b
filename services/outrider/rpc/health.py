"""grpc.health.v1: the state of services, as the methods of whatever class a door puts its services on."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

import grpc
from grpc_health.v1 import health_pb2 as pb

from outrider.rpc.errors import StatusContext, fail
from outrider.rpc.malformed import Malformed, malformed_error

__all__ = ["Health"]

_MAX_NAME_CHARS = 100  # of an unknown service, in an answer that anybody may ask for

_SERVING = pb.HealthCheckResponse.SERVING
_NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING
_UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """Which services are serving. Event loop only. The empty name stands for the whole server.

    A request that was no message comes as `Malformed`: its call gets the status, and an empty answer.
    """

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
        if isinstance(request, Malformed):
            fail(context, malformed_error())
            return pb.HealthCheckResponse()
        state = self._state(request.service)
        if state == _UNKNOWN:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details(f"service: {request.service[:_MAX_NAME_CHARS]!r} is not served here")
        return pb.HealthCheckResponse(status=state)

    async def list_services(self, request: pb.HealthListRequest, context: StatusContext) -> pb.HealthListResponse:
        """Health/List: every service and its state."""
        if isinstance(request, Malformed):
            fail(context, malformed_error())
            return pb.HealthListResponse()
        states = {name: pb.HealthCheckResponse(status=self._state(name)) for name in self._serving}
        return pb.HealthListResponse(statuses=states)

    async def watch(
        self, request: pb.HealthCheckRequest, context: StatusContext
    ) -> AsyncGenerator[pb.HealthCheckResponse, None]:
        """Health/Watch: the state now and after each change, without end."""
        if isinstance(request, Malformed):
            fail(context, malformed_error())
            return
        async with aclosing(self.states(request.service)) as states:
            async for state in states:
                yield pb.HealthCheckResponse(status=state)

    async def states(self, service: str = "") -> AsyncGenerator[pb.HealthCheckResponse.ServingStatus.ValueType, None]:
        """The state of a service now and after each change, without end."""
        told: int | None = None
        while True:
            changed, state = self._changed, self._state(service)
            if state != told:
                told = state
                yield state
            await changed.wait()

    def _state(self, service: str) -> pb.HealthCheckResponse.ServingStatus.ValueType:
        serving = self._serving.get(service)
        if serving is None:
            return _UNKNOWN
        return _SERVING if serving else _NOT_SERVING
