"""A Python client of the public API: domain values in and out, streams that can survive a lost server."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random, SystemRandom
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from outrider.core.dispatch import EngineStatus
from outrider.core.errors import (
    ConfigError,
    DuplicateRequest,
    EngineUnavailable,
    InvalidRequest,
    RequestAborted,
)
from outrider.core.fleet import FleetStatus
from outrider.core.generation import GenerationEvent, GenerationRequest, ModelDescription
from outrider.core.result import GenerationResult, collect
from outrider.rpc.aio_calls import is_being_cancelled
from outrider.rpc.backoff import Backoff, BackoffOptions
from outrider.rpc.channel_options import client_channel_options
from outrider.rpc.errors import domain_error
from outrider.rpc.fleet_conversion import fleet_from_proto
from outrider.rpc.generation_conversion import event_from_proto, model_from_proto, request_to_proto
from outrider.rpc.report_conversion import status_from_proto
from outrider.rpc.resumption import Resumption
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServiceStub, ModelServiceStub

__all__ = ["ClientOptions", "OutriderClient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client calls."""

    api_key: str = ""
    """Sent as `authorization: Bearer`; empty sends none."""
    credentials: grpc.ChannelCredentials | None = None
    """TLS; None connects in the clear."""
    call_timeout_s: float = 10.0
    """Deadline of the short calls (abort, model_info, speculation_status)."""
    max_resumes: int = 8
    """A stream that may resume gives up after this many attempts in a row that brought no token."""
    backoff: BackoffOptions = field(default_factory=lambda: BackoffOptions(initial_s=0.2, max_s=5.0))

    def __post_init__(self) -> None:
        if self.call_timeout_s <= 0:
            raise ConfigError(f"call_timeout_s: {self.call_timeout_s} is not above 0")
        if self.max_resumes < 0:
            raise ConfigError(f"max_resumes: {self.max_resumes} is below 0")


class OutriderClient:
    """Calls one Outrider address. Made on the event loop; close it, or use it in `async with`.

    Every method raises the `OutriderError` that the server meant (`rpc.errors`).
    """

    def __init__(self, target: str, options: ClientOptions | None = None, random: Random | None = None) -> None:
        self._options = options or ClientOptions()
        self._random = random or SystemRandom()
        if self._options.credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=client_channel_options())
        else:
            self._channel = grpc.aio.secure_channel(target, self._options.credentials, options=client_channel_options())
        self._generation = GenerationServiceStub(self._channel)
        self._models = ModelServiceStub(self._channel)

    async def __aenter__(self) -> "OutriderClient":
        """The client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()

    async def close(self) -> None:
        """Cancel what is running and disconnect."""
        await self._channel.close(None)

    async def generate(
        self, request: GenerationRequest, *, resume: bool = False, timeout_s: float | None = None
    ) -> GenerationResult:
        """Run a request to its end. Streams underneath, so that it can resume and be cancelled."""
        async with aclosing(self.stream(request, resume=resume, timeout_s=timeout_s)) as events:
            return await collect(events)

    async def stream(
        self, request: GenerationRequest, *, resume: bool = False, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Stream a request; leaving the iteration (`aclose`, or cancelling) aborts it.

        With `resume`, a stream that breaks with UNAVAILABLE is taken up again behind the last token
        received, with the seed of the first attempt: the caller sees one stream, and one usage.
        `timeout_s` is the deadline of each attempt. Raises `InvalidRequest` for `resume` with n > 1.
        """
        if resume and request.n not in (None, 1):
            raise InvalidRequest("n", "a stream of several choices cannot be resumed")
        resumption = Resumption(request)
        backoff = Backoff(self._options.backoff, self._random)
        while True:
            received_before = resumption.received
            try:
                async with aclosing(self._attempt(resumption.next_attempt(), timeout_s)) as events:
                    async for event in events:
                        if (shown := resumption.see(event)) is not None:
                            yield shown
                return
            except (EngineUnavailable, DuplicateRequest) as error:
                if resumption.received > received_before:
                    backoff.failures = 0
                # After a break our own id may still be taken, by a server that has not noticed it yet.
                expected = isinstance(error, EngineUnavailable) or resumption.started or backoff.failures > 0
                if not resume or not expected or backoff.failures >= self._options.max_resumes:
                    raise
            await asyncio.sleep(backoff.after_loss(0.0))

    async def abort(self, request_id: str) -> bool:
        """End a request of this caller; False when none is known."""
        request = pb.AbortRequest(request_id=request_id)
        try:
            return (await self._generation.Abort(request, **self._short())).found
        except grpc.aio.AioRpcError as error:
            raise domain_error(error) from error

    async def model_info(self, model: str = "") -> ModelDescription:
        """Describe the served model."""
        request = pb.GetModelInfoRequest(model=model)
        try:
            return model_from_proto(await self._models.GetModelInfo(request, **self._short()))
        except grpc.aio.AioRpcError as error:
            raise domain_error(error) from error

    async def speculation_status(self) -> Sequence[EngineStatus]:
        """The state of every engine."""
        return (await self.whole_status())[0]

    async def whole_status(self) -> tuple[Sequence[EngineStatus], FleetStatus]:
        """The state of every engine, and of what they run on."""
        request = pb.GetSpeculationStatusRequest()
        try:
            response = await self._models.GetSpeculationStatus(request, **self._short())
        except grpc.aio.AioRpcError as error:
            raise domain_error(error) from error
        return tuple(status_from_proto(one, "engines") for one in response.engines), fleet_from_proto(response)

    async def _attempt(
        self, request: GenerationRequest, timeout_s: float | None
    ) -> AsyncGenerator[GenerationEvent, None]:
        message = pb.StreamGenerateRequest(spec=request_to_proto(request))
        call = self._generation.StreamGenerate(message, timeout=timeout_s, metadata=self._metadata())
        try:
            async for response in call:
                # A door that can say how a call ends only along with a message sends an empty one.
                if response.WhichOneof("event") is not None:
                    yield event_from_proto(response, request.stop)
        except grpc.aio.AioRpcError as error:
            raise domain_error(error) from error
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            raise RequestAborted("the client was closed") from None
        finally:
            call.cancel()

    def _metadata(self) -> list[tuple[str, str]]:
        key = self._options.api_key
        return [("authorization", f"Bearer {key}")] if key else []

    def _short(self) -> dict[str, Any]:
        return {"timeout": self._options.call_timeout_s, "metadata": self._metadata()}
