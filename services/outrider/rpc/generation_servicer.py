"""The public services on a grpc.aio server. A Ray Serve deployment has the same few lines on its class."""

import asyncio
from contextlib import aclosing
from typing import Any

import grpc.aio

from outrider.core.caller import Authenticate, anonymous
from outrider.core.errors import RequestAborted
from outrider.core.ports import GenerationService
from outrider.rpc.errors import fail
from outrider.rpc.generation_handlers import GenerationHandlers
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import (
    GenerationServiceServicer,
    ModelServiceServicer,
    add_GenerationServiceServicer_to_server,
    add_ModelServiceServicer_to_server,
)

__all__ = ["PUBLIC_SERVICES", "GenerationServicer", "ModelServicer", "add_public_services"]

PUBLIC_SERVICES = ("outrider.v1.GenerationService", "outrider.v1.ModelService")
"""Full names, for health."""


class GenerationServicer(GenerationServiceServicer):
    """GenerationService over grpc.aio."""

    def __init__(self, handlers: GenerationHandlers, stalled_timeout_s: float = 30.0) -> None:
        """`stalled_timeout_s`: a streaming client that reads nothing for this long is cut off."""
        self._handlers = handlers
        self._stalled_timeout_s = stalled_timeout_s

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """Run a request to its end. A client that leaves aborts it."""
        return await self._handlers.generate(request, context)

    async def StreamGenerate(  # type: ignore[override]  # writes by hand, where the stubs expect a generator
        self, request: pb.StreamGenerateRequest, context: Any
    ) -> None:
        """Stream a request. A client that leaves aborts it at once: nothing waits for a collector of garbage."""
        async with aclosing(self._handlers.stream_generate(request, context)) as responses:
            try:
                async for response in responses:
                    async with asyncio.timeout(self._stalled_timeout_s):
                        await context.write(response)
            except TimeoutError:
                fail(context, RequestAborted(f"the client has read nothing for {self._stalled_timeout_s:g} s"))

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """End a running request."""
        return await self._handlers.abort(request, context)


class ModelServicer(ModelServiceServicer):
    """ModelService over grpc.aio."""

    def __init__(self, handlers: GenerationHandlers) -> None:
        self._handlers = handlers

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        """Describe the model."""
        return await self._handlers.get_model_info(request, context)

    async def GetSpeculationStatus(
        self, request: pb.GetSpeculationStatusRequest, context: Any
    ) -> pb.GetSpeculationStatusResponse:
        """Say whether speculation helps."""
        return await self._handlers.get_speculation_status(request, context)


def add_public_services(
    server: grpc.aio.Server, service: GenerationService, authenticate: Authenticate = anonymous
) -> None:
    """Add both services to a server."""
    handlers = GenerationHandlers(service, authenticate)
    add_GenerationServiceServicer_to_server(GenerationServicer(handlers), server)
    add_ModelServiceServicer_to_server(ModelServicer(handlers), server)
