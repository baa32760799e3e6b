"""The methods of GenerationService and ModelService, for every kind of gRPC door.

A handler takes the request and a context that can only set a status and trailers, which is all that
Ray Serve's ingress offers, and grpc.aio offers too. Validate, convert, call, convert back; errors
become a status here and nowhere else, and the handler returns then (raising would drop the trailers).
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from outrider.core.caller import Authenticate, anonymous, caller_of
from outrider.core.dispatch import EngineStatus
from outrider.core.errors import InvalidRequest
from outrider.core.fleet import FleetStatus, PastError
from outrider.core.generation import Caller, GenerationEvent
from outrider.core.ports import GenerationService
from outrider.core.redaction import without_paths
from outrider.core.result import GenerationResult, collect
from outrider.rpc.errors import StatusContext, fail
from outrider.rpc.fleet_conversion import fleet_to_proto
from outrider.rpc.generation_conversion import (
    event_to_proto,
    final_to_proto,
    model_to_proto,
    request_from_proto,
    usage_to_proto,
)
from outrider.rpc.malformed import refuse_malformed
from outrider.rpc.report_conversion import logprobs_to_proto, status_to_proto
from outrider.v1 import generation_pb2 as pb

__all__ = ["CallContext", "GenerationHandlers", "closing"]

R = TypeVar("R")


class CallContext(StatusContext, Protocol):
    """What a handler needs of a call."""

    def invocation_metadata(self) -> Any:
        """Pairs of the client's metadata."""
        ...


@asynccontextmanager
async def closing(events: AsyncIterator[R]) -> AsyncGenerator[AsyncIterator[R], None]:
    """Close an iterator at the end of the block, if it can be closed: that is what aborts its request."""
    try:
        yield events
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


class GenerationHandlers:
    """Serves a `GenerationService` port. Cancelling a handler closes its stream, which aborts the request."""

    def __init__(
        self,
        service: GenerationService,
        authenticate: Authenticate = anonymous,
        *,
        fleet: Callable[[], Awaitable[FleetStatus]] | None = None,
    ) -> None:
        """`fleet`: what the service runs on, for the status; None where nobody knows."""
        self._service = service
        self._authenticate = authenticate
        self._fleet = fleet or _no_fleet

    async def generate(self, request: pb.GenerateRequest, context: CallContext) -> pb.GenerateResponse:
        """GenerationService/Generate."""

        async def answer(caller: Caller) -> pb.GenerateResponse:
            async with closing(self._stream(request, caller)) as events:
                return _result_to_proto(await collect(events))

        return await self._answer(answer, pb.GenerateResponse, context)

    async def stream_generate(
        self, request: pb.StreamGenerateRequest, context: CallContext
    ) -> AsyncGenerator[pb.StreamGenerateResponse, None]:
        """GenerationService/StreamGenerate."""
        try:
            caller = caller_of(context.invocation_metadata(), self._authenticate)
            async with closing(self._stream(request, caller)) as events:
                async for event in events:
                    yield event_to_proto(event)
        except Exception as error:  # noqa: BLE001 - becomes a status
            fail(context, error)

    async def abort(self, request: pb.AbortRequest, context: CallContext) -> pb.AbortResponse:
        """GenerationService/Abort."""

        async def answer(caller: Caller) -> pb.AbortResponse:
            refuse_malformed(request)
            if not request.request_id:
                raise InvalidRequest("request_id", "is not set")
            return pb.AbortResponse(found=await self._service.abort(request.request_id, caller))

        return await self._answer(answer, pb.AbortResponse, context)

    async def get_model_info(self, request: pb.GetModelInfoRequest, context: CallContext) -> pb.GetModelInfoResponse:
        """ModelService/GetModelInfo."""

        async def answer(_: Caller) -> pb.GetModelInfoResponse:
            refuse_malformed(request)
            return model_to_proto(await self._service.model_info(request.model))

        return await self._answer(answer, pb.GetModelInfoResponse, context)

    async def get_speculation_status(
        self, request: pb.GetSpeculationStatusRequest, context: CallContext
    ) -> pb.GetSpeculationStatusResponse:
        """ModelService/GetSpeculationStatus."""

        async def answer(_: Caller) -> pb.GetSpeculationStatusResponse:
            refuse_malformed(request)
            engines = await self._service.speculation_status()
            response = fleet_to_proto(_shown_fleet(await self._fleet()))
            response.engines.extend(status_to_proto(_shown_engine(one)) for one in engines)
            return response

        return await self._answer(answer, pb.GetSpeculationStatusResponse, context)

    async def _answer(
        self, answer: Callable[[Caller], Awaitable[R]], empty: Callable[[], R], context: CallContext
    ) -> R:
        """The answer, or an empty message on a call whose status says what went wrong."""
        try:
            return await answer(caller_of(context.invocation_metadata(), self._authenticate))
        except Exception as error:  # noqa: BLE001 - becomes a status
            fail(context, error)
            return empty()

    def _stream(
        self, request: pb.GenerateRequest | pb.StreamGenerateRequest, caller: Caller
    ) -> AsyncIterator[GenerationEvent]:
        refuse_malformed(request)
        if not request.HasField("spec"):
            raise InvalidRequest("spec", "is not set")
        return self._service.stream(request_from_proto(request.spec), caller)


def _result_to_proto(result: GenerationResult) -> pb.GenerateResponse:
    choices = [
        pb.Choice(
            index=one.end.choice_index,
            text=one.text,
            token_ids=one.token_ids,
            logprobs=logprobs_to_proto(one.token_ids, one.logprobs),
            final=final_to_proto(one.end),
        )
        for one in result.choices
    ]
    return pb.GenerateResponse(
        request_id=result.accepted.request_id,
        model=result.accepted.model,
        choices=choices,
        usage=usage_to_proto(result.usage),
    )


async def _no_fleet() -> FleetStatus:
    return FleetStatus()


def _shown_engine(status: EngineStatus) -> EngineStatus:
    """Without the paths of files, which are nobody's business outside."""
    return replace(status, problem=without_paths(status.problem), recent_errors=_shown_errors(status.recent_errors))


def _shown_fleet(fleet: FleetStatus) -> FleetStatus:
    deployments = tuple(replace(one, message=without_paths(one.message)) for one in fleet.deployments)
    return replace(fleet, deployments=deployments, recent_errors=_shown_errors(fleet.recent_errors))


def _shown_errors(errors: tuple[PastError, ...]) -> tuple[PastError, ...]:
    return tuple(replace(one, text=without_paths(one.text)) for one in errors)
