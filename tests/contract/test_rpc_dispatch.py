"""Router and engine over a real stream."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import pytest
from tests.contract.rpc_fakes import ScriptedEngine, Servers, eventually, proxied

from outrider.core.dispatch import (
    EngineEvent,
    EngineReport,
    EngineStatus,
    ReportRequest,
    RouterCommand,
    SequenceAbort,
    SequenceDelta,
    SequenceEnd,
    SequenceErrorCode,
    SequenceSubmit,
    UpdateGate,
)
from outrider.core.errors import EngineUnavailable, InvalidRequest, Overloaded
from outrider.core.policy import GateSettings
from outrider.core.request import SequenceRequest, StopConditions
from outrider.core.sequence import Finish, FinishReason
from outrider.core.verdict import TokenLogprobs
from outrider.rpc.aio_calls import open_stream
from outrider.rpc.channel_options import Keepalive
from outrider.rpc.dispatch_client import GrpcEngineSession
from outrider.rpc.dispatch_server import DispatchServicer
from outrider.rpc.server import RunningServer
from outrider.v1 import dispatch_pb2 as pb
from outrider.v1.dispatch_pb2_grpc import DispatchServiceStub, add_DispatchServiceServicer_to_server

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    servers = Servers()
    yield servers
    await servers.stop()


def adding(servicer: DispatchServicer) -> Callable[[grpc.aio.Server], None]:
    return lambda server: add_DispatchServiceServicer_to_server(servicer, server)


async def serve(
    servers: Servers, engine: ScriptedEngine, *, keepalive: Keepalive | None = None, stalled_timeout_s: float = 30.0
) -> tuple[RunningServer, DispatchServicer]:
    servicer = DispatchServicer(engine, auth_token="secret", stalled_timeout_s=stalled_timeout_s)
    return await servers.start(adding(servicer), keepalive=keepalive), servicer


async def connect(
    address: str, *, router_id: str = "router-0", keepalive: Keepalive | None = None
) -> GrpcEngineSession:
    return await GrpcEngineSession.connect(address, router_id, 10.0, auth_token="secret", keepalive=keepalive)


def submit(stream_key: int, prompt: tuple[int, ...] = (1, 2, 3)) -> SequenceSubmit:
    request = SequenceRequest(
        request_id=f"request-{stream_key}",
        prompt_token_ids=prompt,
        stop=StopConditions(max_tokens=5, eos_token_ids=(0,)),
        noise_key=2**63,
        timeout_s=1.5,
    )
    return SequenceSubmit(stream_key=stream_key, request=request)


async def test_commands_and_events_both_ways(servers: Servers) -> None:
    engine = ScriptedEngine()
    server, servicer = await serve(servers, engine)
    session = await connect(server.address)
    (at_engine,) = engine.sessions
    assert session.hello == at_engine.hello
    assert at_engine.router_id == "router-0"
    commands: list[RouterCommand] = [
        submit(1),
        submit(2, tuple(range(1000))),
        UpdateGate(settings=GateSettings()),
        SequenceAbort(stream_key=2),
    ]
    session.send(commands)
    session.send([ReportRequest(nonce=6)])
    status = EngineStatus(engine_id="engine-0", ready=True)
    assert await session.receive() == [EngineReport(nonce=6, status=status)]
    assert at_engine.received == [*commands, ReportRequest(nonce=6)]
    events: list[EngineEvent] = [
        SequenceDelta(
            stream_key=1,
            first_token_index=0,
            token_ids=(7, 8),
            logprobs=(TokenLogprobs(logprob=-0.5, top=((7, -0.5),)), TokenLogprobs(logprob=-1.0, top=())),
        ),
        SequenceEnd(stream_key=1, finish=Finish(reason=FinishReason.STOP, stop_token_id=0)),
    ]
    at_engine.push(*events)
    assert await session.receive() == events
    assert servicer.streams == 1
    session.close()
    session.close()
    await session.wait_closed()
    await eventually(lambda: at_engine.closed and servicer.streams == 0)
    with pytest.raises(EngineUnavailable, match="closed"):
        session.send([ReportRequest(nonce=7)])
    with pytest.raises(EngineUnavailable, match="closed"):
        await session.receive()


async def test_an_engine_that_fails_names_the_cause(servers: Servers) -> None:
    engine = ScriptedEngine()
    server, _ = await serve(servers, engine)
    session = await connect(server.address)
    engine.sessions[0].push(SequenceDelta(stream_key=1, first_token_index=0, token_ids=(5,)))
    engine.sessions[0].fail("rank 2 died")
    received = await session.receive()
    assert received == [SequenceDelta(stream_key=1, first_token_index=0, token_ids=(5,))]
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="rank 2 died"):
            await session.receive()
    await session.wait_closed()


async def test_a_server_that_stops_is_noticed(servers: Servers) -> None:
    engine = ScriptedEngine()
    server, _ = await serve(servers, engine)
    session = await connect(server.address)
    await server.stop()
    with pytest.raises(EngineUnavailable):
        await session.receive()
    await session.wait_closed()
    assert engine.sessions[0].closed


async def test_a_half_open_connection_is_noticed_by_the_router(servers: Servers) -> None:
    server, _ = await serve(servers, ScriptedEngine())
    async with proxied(server.port) as proxy:
        session = await connect(f"127.0.0.1:{proxy.port}", keepalive=Keepalive(time_s=0.2, timeout_s=0.2))
        proxy.silence()
        with pytest.raises(EngineUnavailable, match="UNAVAILABLE"):
            await session.receive()
        await session.wait_closed()


async def test_a_router_that_falls_silent_has_its_sequences_aborted(servers: Servers) -> None:
    engine = ScriptedEngine()
    server, _ = await serve(servers, engine, keepalive=Keepalive(time_s=0.2, timeout_s=0.2))
    async with proxied(server.port) as proxy:
        session = await connect(f"127.0.0.1:{proxy.port}", keepalive=Keepalive(time_s=60, timeout_s=60))
        session.send([submit(1)])
        await eventually(lambda: len(engine.sessions[0].received) == 1)
        proxy.silence()
        await eventually(lambda: engine.sessions[0].closed)
        session.close()
        await session.wait_closed()


async def test_a_router_that_stops_reading_delays_nobody_and_is_let_go(servers: Servers) -> None:
    engine = ScriptedEngine()
    server, _ = await serve(servers, engine, stalled_timeout_s=0.5)
    quick = await connect(server.address, router_id="quick")
    async with proxied(server.port) as proxy:
        slow = await connect(f"127.0.0.1:{proxy.port}", router_id="slow", keepalive=Keepalive(time_s=60, timeout_s=60))
        proxy.silence()
        big = SequenceDelta(stream_key=1, first_token_index=0, token_ids=tuple(range(2**20, 2**20 + 200_000)))
        for _ in range(60):
            engine.sessions[1].push(big)
            quick.send([ReportRequest(nonce=3)])
            (answer,) = await quick.receive()
            assert isinstance(answer, EngineReport)
        await eventually(lambda: engine.sessions[1].closed)
        assert not engine.sessions[0].closed
        slow.close()
        await slow.wait_closed()
    quick.close()
    await quick.wait_closed()


async def test_a_malformed_submit_fails_that_sequence_only(servers: Servers) -> None:
    engine = ScriptedEngine()
    server, servicer = await serve(servers, engine)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = open_stream(DispatchServiceStub(channel).Connect)
        hello = pb.RouterHello(router_id="r", protocol_version=1, auth_token="secret")
        bad = pb.SubmitSequence(stream_key=4, prompt_token_ids=[1], max_tokens=0)
        commands = [
            pb.RouterCommand(hello=hello),
            pb.RouterCommand(submit=bad),
            pb.RouterCommand(),
            pb.RouterCommand(report=pb.ReportRequest(nonce=1)),
        ]
        await call.write(pb.ConnectRequest(commands=commands))
        events: list[pb.EngineEvent] = []
        while len(events) < 3:
            message = await call.read()
            assert isinstance(message, pb.ConnectResponse)
            events.extend(message.events)
        assert events[0].hello.protocol_version == 1
        ends = [event.end for event in events if event.HasField("end")]
        assert [(end.stream_key, end.error_message) for end in ends] == [(4, "max_tokens: 0 is below 1")]
        assert ends[0].error_code == pb.SEQUENCE_ERROR_CODE_INVALID
        assert servicer.dropped == 1
        assert engine.sessions[0].received == [ReportRequest(nonce=1)]


async def test_what_finds_no_room_ends_as_overloaded_and_aborts_still_go_through(servers: Servers) -> None:
    engine = ScriptedEngine()
    server, _ = await serve(servers, engine)
    session = await connect(server.address)
    engine.sessions[0].room = 2
    session.send([SequenceAbort(stream_key=9), submit(1), submit(2), submit(3)])
    ends = await session.receive()
    assert [(end.stream_key, end.failure.code) for end in ends if isinstance(end, SequenceEnd) and end.failure] == [
        (2, SequenceErrorCode.OVERLOADED),
        (3, SequenceErrorCode.OVERLOADED),
    ]
    assert engine.sessions[0].received == [SequenceAbort(stream_key=9), submit(1)]
    session.close()
    await session.wait_closed()


async def test_a_full_queue_is_said_at_once(servers: Servers) -> None:
    server, _ = await serve(servers, ScriptedEngine())
    session = await connect(server.address)
    with pytest.raises(Overloaded) as caught:
        session.send([ReportRequest(nonce=1)] * 5000)  # before the sender has had a turn
    assert caught.value.retry_after_s > 0
    with pytest.raises(InvalidRequest):
        session.send([SequenceAbort(stream_key=-1)])
    session.close()
    await session.wait_closed()


async def test_malformed_events_fail_their_sequence(servers: Servers) -> None:
    class Strange(DispatchServicer):
        async def Connect(self, request_iterator: object, context: object) -> None:  # type: ignore[override]
            await context.read()  # type: ignore[attr-defined]
            events = [
                pb.EngineEvent(hello=pb.EngineHello(engine_id="e", protocol_version=1)),
                pb.EngineEvent(end=pb.SequenceEnd(stream_key=5)),
                pb.EngineEvent(),
            ]
            await context.write(pb.ConnectResponse(events=events[:1]))  # type: ignore[attr-defined]
            await context.write(pb.ConnectResponse(events=events[1:]))  # type: ignore[attr-defined]
            await context.read()  # type: ignore[attr-defined]

    server = await servers.start(adding(Strange(ScriptedEngine())))
    session = await connect(server.address)
    (end,) = await session.receive()
    assert isinstance(end, SequenceEnd)
    assert end.stream_key == 5
    assert end.failure is not None
    assert end.failure.code is SequenceErrorCode.UNAVAILABLE
    assert session.dropped == 2
    session.close()
    await session.wait_closed()


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (pb.RouterCommand(report=pb.ReportRequest()), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.RouterCommand(hello=pb.RouterHello(protocol_version=7)), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.RouterCommand(hello=pb.RouterHello(protocol_version=1)), grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_a_stream_that_starts_wrongly_is_refused(
    servers: Servers, command: pb.RouterCommand, code: grpc.StatusCode
) -> None:
    engine = ScriptedEngine()
    server, _ = await serve(servers, engine)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = open_stream(DispatchServiceStub(channel).Connect)
        await call.write(pb.ConnectRequest(commands=[command]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == code
    assert engine.sessions == []


async def test_connecting_says_why_it_failed(servers: Servers) -> None:
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:1: UNAVAILABLE"):
        await connect("127.0.0.1:1")
    server, _ = await serve(servers, ScriptedEngine())
    with pytest.raises(EngineUnavailable, match="UNAUTHENTICATED"):
        await GrpcEngineSession.connect(server.address, "router-0", 10.0, auth_token="wrong")
    async with proxied(server.port) as proxy:
        proxy.silence()
        with pytest.raises(EngineUnavailable, match="no answer within"):
            await GrpcEngineSession.connect(f"127.0.0.1:{proxy.port}", "router-0", 0.1)


async def test_receive_may_be_cancelled_without_harm(servers: Servers) -> None:
    engine = ScriptedEngine()
    server, _ = await serve(servers, engine)
    session = await connect(server.address)
    waiting = asyncio.create_task(session.receive())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    session.send([ReportRequest(nonce=1)])
    assert len(await session.receive()) == 1
    session.close()
    await session.wait_closed()
