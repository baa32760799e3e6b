"""Bytes that are no message: every server says so, and goes on."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.contract.rpc_fakes import HealthOnly, ScriptedDraft, ScriptedEngine, Servers, eventually

from outrider.core.dispatch import EngineStatus
from outrider.core.generation import Caller, GenerationAccepted, GenerationEvent, GenerationRequest, TextDelta
from outrider.core.ports import GenerationService
from outrider.rpc.dispatch_client import GrpcEngineSession
from outrider.rpc.dispatch_server import DispatchServicer
from outrider.rpc.generation_handlers import GenerationHandlers
from outrider.rpc.generation_servicer import GenerationServicer, add_public_services
from outrider.rpc.health import Health
from outrider.rpc.ingress import add_generation_service, add_health_service, add_model_service
from outrider.rpc.link_server import SpeculationServicer
from outrider.rpc.malformed import Malformed
from outrider.v1 import dispatch_pb2
from outrider.v1 import generation_pb2 as pb
from outrider.v1.dispatch_pb2_grpc import add_DispatchServiceServicer_to_server
from outrider.v1.generation_pb2_grpc import (
    GenerationServiceStub,
    ModelServiceStub,
    add_GenerationServiceServicer_to_server,
)
from outrider.v1.speculation_pb2_grpc import add_SpeculationServiceServicer_to_server

pytestmark = pytest.mark.timeout(60)

JUNK = b"\xff\xff\xff\xff"
WORDS = "request: is not a protobuf message of this method"


class Endless:
    """Streams large messages for as long as somebody listens."""

    def __init__(self) -> None:
        self.closed = 0

    async def stream(self, request: GenerationRequest, caller: Caller) -> AsyncGenerator[GenerationEvent, None]:
        try:
            yield GenerationAccepted(request_id="r", model="m", seed=1, prompt_tokens=1)
            while True:
                yield TextDelta(choice_index=0, first_token_index=0, text="x" * 100_000, token_ids=(1,), seed=1)
                await asyncio.sleep(0)
        finally:
            self.closed += 1

    async def abort(self, request_id: str, caller: Caller) -> bool:
        return False

    async def model_info(self, model: str) -> Any:
        raise AssertionError("not asked")

    async def speculation_status(self) -> tuple[EngineStatus, ...]:
        return ()


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    made = Servers()
    yield made
    await made.stop()


async def status_of_junk(channel: grpc.aio.Channel, method: str, kind: str) -> tuple[grpc.StatusCode, str]:
    call: Any
    raw: Any = channel  # the stubs want the serializers that this test does without
    if kind == "unary":
        call = raw.unary_unary(method)(JUNK, timeout=10)
    elif kind == "stream":
        call = raw.unary_stream(method)(JUNK, timeout=10)
    else:
        call = raw.stream_stream(method)(timeout=10)
        await call.write(JUNK)
    return await call.code(), await call.details()


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("/outrider.v1.GenerationService/Generate", "unary"),
        ("/outrider.v1.GenerationService/StreamGenerate", "stream"),
        ("/outrider.v1.GenerationService/Abort", "unary"),
        ("/outrider.v1.ModelService/GetModelInfo", "unary"),
        ("/outrider.v1.ModelService/GetSpeculationStatus", "unary"),
        ("/grpc.health.v1.Health/Check", "unary"),
        ("/grpc.health.v1.Health/List", "unary"),
        ("/grpc.health.v1.Health/Watch", "stream"),
        ("/outrider.v1.DispatchService/Connect", "both"),
        ("/outrider.v1.SpeculationService/Link", "both"),
    ],
)
async def test_every_method_refuses_junk_as_invalid(servers: Servers, method: str, kind: str) -> None:
    service: GenerationService = Endless()
    server = await servers.start(
        partial(add_public_services, service=service),
        partial(add_health_service, HealthOnly(Health([]))),
        partial(add_DispatchServiceServicer_to_server, DispatchServicer(ScriptedEngine())),
        partial(add_SpeculationServiceServicer_to_server, SpeculationServicer(ScriptedDraft())),
    )
    async with grpc.aio.insecure_channel(server.address) as channel:
        code, words = await status_of_junk(channel, method, kind)
        assert (code, words) == (grpc.StatusCode.INVALID_ARGUMENT, WORDS)
        status = await ModelServiceStub(channel).GetSpeculationStatus(pb.GetSpeculationStatusRequest(), timeout=10)
        assert list(status.engines) == []


async def test_junk_later_in_a_stream_ends_that_stream_alone(servers: Servers) -> None:
    engine = ScriptedEngine()
    server = await servers.start(partial(add_DispatchServiceServicer_to_server, DispatchServicer(engine)))
    other = await GrpcEngineSession.connect(server.address, "other", 5.0)
    async with grpc.aio.insecure_channel(server.address) as channel:
        raw: Any = channel
        call = raw.stream_stream("/outrider.v1.DispatchService/Connect")(timeout=10)
        hello = dispatch_pb2.RouterHello(router_id="r", protocol_version=1)
        first = dispatch_pb2.ConnectRequest(commands=[dispatch_pb2.RouterCommand(hello=hello)])
        await call.write(first.SerializeToString())
        await call.read()
        await call.write(JUNK)
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert [one.closed for one in engine.sessions] == [False, True]
    other.close()
    await other.wait_closed()


class Registrar:
    """What a server is told about a service."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self.handlers |= handlers[0]._method_handlers

    def add_registered_method_handlers(self, service_name: str, handlers: Any) -> None:
        for name, one in handlers.items():
            assert isinstance(one.request_deserializer(JUNK), Malformed), (service_name, name)


def test_serves_proxies_pass_junk_on_and_read_the_rest() -> None:
    registrar = Registrar()
    for add in (add_generation_service, add_model_service, add_health_service):
        add(GenerationServicerOfAnything(), registrar)
    assert "/outrider.v1.GenerationService/StreamGenerate" in registrar.handlers
    assert "/grpc.health.v1.Health/Watch" in registrar.handlers
    for handler in registrar.handlers.values():
        assert isinstance(handler.request_deserializer(JUNK), Malformed)
    read = registrar.handlers["/outrider.v1.GenerationService/Abort"].request_deserializer
    message = pb.AbortRequest(request_id="r")
    assert read(message.SerializeToString()) == message


class GenerationServicerOfAnything:
    def __getattr__(self, name: str) -> Any:
        return None


async def test_a_client_that_reads_nothing_is_cut_off_with_a_status(servers: Servers) -> None:
    service = Endless()
    servicer = GenerationServicer(GenerationHandlers(service), stalled_timeout_s=0.2)
    server = await servers.start(partial(add_GenerationServiceServicer_to_server, servicer))
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = GenerationServiceStub(channel).StreamGenerate(
            pb.StreamGenerateRequest(spec=pb.GenerationSpec(text="hi")), timeout=30
        )
        await call.wait_for_connection()
        await eventually(lambda: service.closed == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [one async for one in call]
    assert caught.value.code() == grpc.StatusCode.CANCELLED
    assert caught.value.details() == "the client has read nothing for 0.2 s"
