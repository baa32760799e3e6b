"""Target and draft over a real stream: greeting, events, garbage, loss and return."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import grpc
import grpc.aio
import pytest
from tests.contract.rpc_fakes import HELLO, RealClock, ScriptedDraft, Servers, eventually, proxied

from outrider.core.link import (
    Busy,
    Capability,
    CloseSequence,
    Drain,
    Goodbye,
    Hello,
    LinkDown,
    LinkErrorCode,
    LinkEvent,
    LinkUp,
    OpenAck,
    OpenSequence,
    OutcomeEntry,
    OutcomeTable,
    Ping,
    Pong,
    Resync,
)
from outrider.core.proposal import Proposal
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import ProposalSource, VerificationRule
from outrider.rpc.aio_calls import END, open_stream
from outrider.rpc.backoff import BackoffOptions
from outrider.rpc.channel_options import Keepalive
from outrider.rpc.link_client import GrpcDraftTransport, LinkOptions
from outrider.rpc.link_conversion import LinkIdentity, LinkWriter
from outrider.rpc.link_server import SpeculationServicer
from outrider.rpc.link_stream import StreamOptions
from outrider.rpc.server import RunningServer
from outrider.v1 import speculation_pb2 as pb
from outrider.v1.speculation_pb2_grpc import SpeculationServiceStub, add_SpeculationServiceServicer_to_server

pytestmark = pytest.mark.timeout(60)

QUICK = BackoffOptions(initial_s=0.02, max_s=0.1, refused_s=300.0, stable_s=1.0)


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    servers = Servers()
    yield servers
    await servers.stop()


async def serve(
    servers: Servers, draft: ScriptedDraft, port: int = 0, *, auth_token: str = "", keepalive: Keepalive | None = None
) -> tuple[RunningServer, SpeculationServicer]:
    servicer = SpeculationServicer(draft, auth_token=auth_token)
    return await servers.start(adding(servicer), port=port, keepalive=keepalive), servicer


def adding(servicer: SpeculationServicer) -> Callable[[grpc.aio.Server], None]:
    return lambda server: add_SpeculationServiceServicer_to_server(servicer, server)


class Engine:
    """The engine thread's side of a transport, usable from a test's coroutine."""

    def __init__(self, transport: GrpcDraftTransport) -> None:
        self.transport = transport
        self._pending: list[LinkEvent] = []

    async def next(self) -> LinkEvent:
        while not self._pending:
            self._pending = await asyncio.to_thread(self.transport.receive, 20.0)
            assert self._pending, "nothing arrived"
        return self._pending.pop(0)

    async def up(self) -> LinkUp:
        event = await self.next()
        assert isinstance(event, LinkUp), event
        return event

    async def down(self) -> LinkDown:
        event = await self.next()
        assert isinstance(event, LinkDown), event
        return event


@asynccontextmanager
async def engine(
    address: str | None, hello: Hello = HELLO, options: LinkOptions | None = None
) -> AsyncIterator[Engine]:
    transport = GrpcDraftTransport(
        hello, clock=RealClock(), options=options or LinkOptions(backoff=QUICK), random=Random(7)
    )
    transport.set_address(address)
    transport.start()
    try:
        yield Engine(transport)
    finally:
        await transport.stop()


async def test_greeting_and_events_both_ways(servers: Servers) -> None:
    draft = ScriptedDraft(incarnation=9)
    server, servicer = await serve(servers, draft)
    async with engine(server.address) as target:
        assert not target.transport.send([Ping(nonce=1)]), "nothing can be sent before LinkUp is taken"
        up = await target.up()
        (session,) = draft.sessions
        assert up.address == server.address
        assert up.hello == session.ack
        assert session.hello == replace(HELLO, link_id=up.link_id)
        assert up.link_id != 0

        opening = OpenSequence(
            handle=1,
            token_ids=tuple(range(9000)),
            prompt_len=8000,
            sampling=SamplingParams(temperature=0.5),
            noise_key=2**64 - 1,
            rule=VerificationRule.COUPLED,
        )
        assert target.transport.send([opening, Ping(nonce=5)])
        assert await target.next() == Pong(nonce=5)
        assert session.received == [opening, Ping(nonce=5)]
        session.push(OpenAck(handle=1, have_len=9000), Busy(retry_after_s=0.25))
        assert await target.next() == OpenAck(handle=1, have_len=9000)
        assert await target.next() == Busy(retry_after_s=0.25)
        assert target.transport.messages_sent == 2  # Hello, and everything else in one
        assert target.transport.messages_received == 3
        assert target.transport.dropped == 0
        assert servicer.counters.messages_received == 2
        assert servicer.counters.messages_sent == 3
        assert servicer.links == 1


async def test_the_end_of_a_link_is_a_message(servers: Servers) -> None:
    draft = ScriptedDraft()
    server, servicer = await serve(servers, draft)
    async with engine(server.address) as target:
        await target.up()
        assert target.transport.send([CloseSequence(handle=1)])
    (session,) = draft.sessions
    assert session.received == [CloseSequence(handle=1), Goodbye(reason="the engine stops")]
    await eventually(lambda: session.closed and servicer.links == 0)


async def test_close_from_the_engine_thread_ends_the_transport(servers: Servers) -> None:
    draft = ScriptedDraft()
    server, _ = await serve(servers, draft)
    async with engine(server.address) as target:
        await target.up()
        await asyncio.to_thread(target.transport.close)
        assert await asyncio.to_thread(target.transport.receive, 20.0) == []
        await eventually(lambda: draft.sessions[0].closed)
        assert not target.transport.send([Ping(nonce=1)])


async def test_a_draft_that_drains_says_so(servers: Servers) -> None:
    draft = ScriptedDraft()
    server, servicer = await serve(servers, draft)
    async with engine(server.address) as target:
        await target.up()
        await servicer.drain("scaled down")
        assert await target.next() == Drain(reason="scaled down")
        draft.sessions[0].close()
        down = await target.down()
        assert down.cause == "the draft drained: scaled down"


async def test_a_server_that_restarts_gets_a_new_link(servers: Servers) -> None:
    first = ScriptedDraft(incarnation=1)
    server, _ = await serve(servers, first)
    async with engine(server.address) as target:
        up = await target.up()
        await server.stop()
        down = await target.down()
        assert down.link_id == up.link_id
        assert not target.transport.send([Ping(nonce=1)])
        second = ScriptedDraft(incarnation=2)
        server, _ = await serve(servers, second, server.port)
        event = await target.next()
        while isinstance(event, LinkDown):  # attempts in between
            event = await target.next()
        assert isinstance(event, LinkUp)
        assert event.link_id != up.link_id
        assert event.hello.incarnation == 2
        assert target.transport.send([Ping(nonce=2)])
        assert await target.next() == Pong(nonce=2)
        assert second.sessions[0].received == [Ping(nonce=2)]


async def test_a_refused_link_names_the_cause_and_waits_long(servers: Servers) -> None:
    draft = ScriptedDraft()
    server, servicer = await serve(servers, draft)
    async with engine(server.address, replace(HELLO, tokenizer_fingerprint=b"other")) as target:
        down = await target.down()
        assert down.cause == "refused: vocabulary: the tokenizers differ at id 7"
        # The back-off of 300 s ends at once when there is another draft to try.
        target.transport.set_addresses(["127.0.0.1:1", server.address])
        assert (await target.down()).cause.startswith("UNAVAILABLE")
        assert servicer.counters.messages_received == 1


async def test_a_wrong_secret_is_refused(servers: Servers) -> None:
    draft = ScriptedDraft()
    server, _ = await serve(servers, draft, auth_token="right")
    async with engine(server.address, replace(HELLO, auth_token="wrong")) as target:
        down = await target.down()
        assert down.cause.startswith("refused: unauthenticated: auth_token")
    async with engine(server.address, replace(HELLO, auth_token="right")) as target:
        await target.up()


async def test_the_link_follows_the_address(servers: Servers) -> None:
    one, two = ScriptedDraft(incarnation=1), ScriptedDraft(incarnation=2)
    server_one, _ = await serve(servers, one)
    server_two, _ = await serve(servers, two)
    async with engine(None) as target:
        target.transport.set_address(server_one.address)
        assert (await target.up()).hello.incarnation == 1
        await asyncio.to_thread(target.transport.set_address, server_two.address)
        assert (await target.down()).cause == "another draft is preferred"
        assert (await target.up()).hello.incarnation == 2
        assert one.sessions[0].received == [Goodbye(reason="another draft is preferred")]
        target.transport.set_address(None)
        assert (await target.down()).cause == "no draft is wanted"


async def test_an_unreachable_draft_is_reported_once_and_the_next_candidate_tried(servers: Servers) -> None:
    draft = ScriptedDraft()
    server, _ = await serve(servers, draft)
    async with engine(None) as target:
        target.transport.set_addresses(["127.0.0.1:1", server.address])
        assert (await target.down()).cause.startswith("UNAVAILABLE")
        assert (await target.up()).address == server.address


def table() -> OutcomeTable:
    entries = [
        OutcomeEntry(
            num_accepted=accepted,
            next_token_id=40 + accepted,
            proposal=Proposal(
                base_len=21 + accepted,
                block_id=1 + accepted,
                token_ids=tuple(range(accepted, 4)),
                source=ProposalSource.DRAFT,
            ),
        )
        for accepted in range(4)
    ]
    return OutcomeTable.of(1, 20, 9, entries)


@pytest.mark.parametrize("packed", [True, False])
async def test_a_table_is_sent_as_the_target_reads_it(servers: Servers, packed: bool) -> None:
    """As columns to a target that says so, as entries to one that knows nothing else; either brings the same."""
    without = HELLO.capabilities - {Capability.PACKED_TABLES}
    hello = replace(HELLO, capabilities=without | {Capability.PACKED_TABLES} if packed else without)
    draft = ScriptedDraft()
    server, _ = await serve(servers, draft)
    async with engine(server.address, hello) as target:
        await target.up()
        draft.sessions[0].push(table())
        assert await target.next() == table()
        assert target.transport.dropped == 0
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = open_stream(SpeculationServiceStub(channel).Link)
        unknown = LinkIdentity(link_id=77, engine_epoch=3, draft_incarnation=0)
        await call.write(LinkWriter(unknown).hello(hello))
        assert isinstance(await call.read(), pb.LinkResponse)
        draft.sessions[1].push(table())
        response = await call.read()
        assert isinstance(response, pb.LinkResponse)
        (event,) = response.events
        assert len(event.outcome_table.entries) == (0 if packed else 4)
        assert len(event.outcome_table.block_ids) == (4 if packed else 0)
        await call.done_writing()


async def test_garbage_from_a_draft_is_dropped_and_counted(servers: Servers) -> None:
    """A hostile server: wrong link, wrong incarnation, duplicates, unknown enums, unset events, a second ack."""
    right: list[pb.LinkResponse] = []

    class Hostile(SpeculationServicer):
        async def Link(self, request_iterator: object, context: object) -> None:  # type: ignore[override]
            first = await context.read()  # type: ignore[attr-defined]
            ack = ScriptedDraft(incarnation=4).connect(HELLO).ack
            identity = LinkIdentity(
                link_id=first.header.link_id, engine_epoch=first.header.engine_epoch, draft_incarnation=4
            )
            writer = LinkWriter(identity)
            (greeting,) = writer.responses([ack])
            garbage = [*writer.responses([Pong(nonce=1)]), *writer.responses([Pong(nonce=2)])]
            garbage[0].header.link_id += 1
            garbage[1].header.draft_incarnation += 1
            (unknown,) = writer.responses([ack])
            unknown.events.append(pb.DraftEvent(evicted=pb.Evicted(handle=1)))
            unknown.events.append(pb.DraftEvent())
            law = pb.SparseLaw(token_ids=[1, 2], probs=[0.5])
            unknown.events.append(pb.DraftEvent(block_laws=pb.BlockLaws(handle=1, block_id=1, laws=[law])))
            unknown.events.append(pb.DraftEvent(block_laws=pb.BlockLaws(handle=1, block_id=0)))
            (good,) = writer.responses([Pong(nonce=3)])
            for message in (greeting, greeting, *garbage, unknown, good, good):
                right.append(message)
                await context.write(message)  # type: ignore[attr-defined]
            await context.read()  # type: ignore[attr-defined]

    hostile = Hostile(ScriptedDraft())
    server = await servers.start(adding(hostile))
    async with engine(server.address) as target:
        await target.up()
        assert await target.next() == Pong(nonce=3)
        await eventually(lambda: target.transport.messages_received == 7)
        # the repeated greeting, two strangers, a late ack, four malformed events, and the duplicate
        assert target.transport.dropped == 9


async def test_garbage_from_a_target_is_dropped_and_counted(servers: Servers) -> None:
    draft = ScriptedDraft(incarnation=2)
    server, servicer = await serve(servers, draft)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = open_stream(SpeculationServiceStub(channel).Link)
        unknown = LinkIdentity(link_id=77, engine_epoch=3, draft_incarnation=0)
        await call.write(LinkWriter(unknown).hello(HELLO))
        response = await call.read()
        assert isinstance(response, pb.LinkResponse)
        assert response.header.link_id == 77
        assert response.header.draft_incarnation == 2
        writer = LinkWriter(LinkIdentity(link_id=77, engine_epoch=3, draft_incarnation=2), messages=1)
        strange = [*writer.requests([Ping(nonce=1)]), *writer.requests([Ping(nonce=2)])]
        strange[0].header.link_id = 78
        strange[1].header.engine_epoch = 4
        (mixed,) = writer.requests([Ping(nonce=3)])
        mixed.events.append(pb.TargetEvent())
        mixed.events.append(pb.TargetEvent(launch=pb.Launch(rows=[pb.LaunchRow(source=9)])))  # type: ignore[arg-type]
        mixed.events.append(pb.TargetEvent(resync=pb.Resync(text=pb.TokenChunk(chunk_index=3))))
        for message in (*strange, mixed, mixed):
            await call.write(message)
        answer = await call.read()
        assert isinstance(answer, pb.LinkResponse)
        assert answer.events[0].pong.nonce == 3
        await eventually(lambda: servicer.counters.messages_received == 5)
        assert draft.sessions[0].received == [Ping(nonce=3)]
        assert servicer.counters.dropped == 6
    await eventually(lambda: draft.sessions[0].closed)


@pytest.mark.parametrize(
    ("header", "events", "code"),
    [
        ({"protocol_version": 9, "link_id": 1}, [pb.TargetEvent(hello=pb.Hello())], LinkErrorCode.VERSION),
        ({"protocol_version": 1, "link_id": 0}, [pb.TargetEvent(hello=pb.Hello())], LinkErrorCode.MALFORMED),
        ({"protocol_version": 1, "link_id": 1}, [], LinkErrorCode.MALFORMED),
        ({"protocol_version": 1, "link_id": 1}, [pb.TargetEvent(ping=pb.Ping())], LinkErrorCode.MALFORMED),
    ],
)
async def test_a_link_that_starts_wrongly_is_refused(
    servers: Servers, header: dict[str, int], events: list[pb.TargetEvent], code: LinkErrorCode
) -> None:
    server, _ = await serve(servers, ScriptedDraft())
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = open_stream(SpeculationServiceStub(channel).Link)
        await call.write(pb.LinkRequest(header=pb.LinkHeader(**header), events=events))
        response = await call.read()
        assert isinstance(response, pb.LinkResponse)
        assert response.events[0].error.code == pb.LinkErrorCode.Value(f"LINK_ERROR_CODE_{code.name}")
        assert await call.read() is END


async def test_a_client_that_never_says_hello_is_let_go(servers: Servers) -> None:
    servicer = SpeculationServicer(ScriptedDraft(), hello_timeout_s=0.05)
    server = await servers.start(adding(servicer))
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = open_stream(SpeculationServiceStub(channel).Link)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_swamped_draft_ends_the_link_and_it_comes_back(servers: Servers) -> None:
    draft = ScriptedDraft()
    server, _ = await serve(servers, draft)
    async with engine(server.address) as target:
        await target.up()
        draft.sessions[0].swamped = True
        assert target.transport.send([Ping(nonce=1)])
        assert "the draft is swamped" in (await target.down()).cause
        await target.up()


async def test_a_full_queue_says_no_and_blocks_nobody(servers: Servers) -> None:
    """The draft stops reading: flow control fills, then the queue; `send` never waits."""
    draft = ScriptedDraft()
    server, _ = await serve(servers, draft)
    async with proxied(server.port) as proxy:
        options = LinkOptions(
            backoff=QUICK,
            queue_messages=4,
            stream=StreamOptions(keepalive=Keepalive(time_s=30, timeout_s=30), goodbye_timeout_s=0.05),
        )
        async with engine(f"127.0.0.1:{proxy.port}", options=options) as target:
            await target.up()
            proxy.silence()
            big = Resync(handle=1, first_position=0, token_ids=tuple(range(2**20, 2**20 + 50_000)))

            def send_until_refused() -> int:
                count = 0
                while target.transport.send([big]):
                    count += 1
                return count

            assert await asyncio.to_thread(send_until_refused) >= 4


async def test_a_half_open_connection_is_noticed_by_the_target(servers: Servers) -> None:
    draft = ScriptedDraft()
    server, _ = await serve(servers, draft)
    async with proxied(server.port) as proxy:
        options = LinkOptions(
            backoff=QUICK, stream=StreamOptions(keepalive=Keepalive(time_s=0.2, timeout_s=0.2), hello_timeout_s=0.5)
        )
        async with engine(f"127.0.0.1:{proxy.port}", options=options) as target:
            up = await target.up()
            proxy.silence()
            down = await target.down()
            assert down.link_id == up.link_id
            assert "UNAVAILABLE" in down.cause
            proxy.resume()
            event = await target.next()
            while isinstance(event, LinkDown):
                event = await target.next()
            assert isinstance(event, LinkUp)


async def test_a_half_open_connection_is_noticed_by_the_draft(servers: Servers) -> None:
    draft = ScriptedDraft()
    server, servicer = await serve(servers, draft, keepalive=Keepalive(time_s=0.2, timeout_s=0.2))
    async with proxied(server.port) as proxy:
        slow = StreamOptions(keepalive=Keepalive(time_s=60, timeout_s=60), goodbye_timeout_s=0.05)
        options = LinkOptions(backoff=QUICK, stream=slow)
        async with engine(f"127.0.0.1:{proxy.port}", options=options) as target:
            await target.up()
            proxy.silence()
            await eventually(lambda: draft.sessions[0].closed)
            await eventually(lambda: servicer.links == 0)


async def test_frequent_pings_are_welcome(servers: Servers) -> None:
    """A quiet link lives through many keepalive pings: no GOAWAY too_many_pings."""
    draft = ScriptedDraft()
    server, _ = await serve(servers, draft)
    keepalive = Keepalive(time_s=0.05, timeout_s=5)
    async with engine(
        server.address, options=LinkOptions(backoff=QUICK, stream=StreamOptions(keepalive=keepalive))
    ) as target:
        await target.up()
        assert await asyncio.to_thread(target.transport.receive, 1.5) == []
        assert target.transport.send([Ping(nonce=1)])
        assert await target.next() == Pong(nonce=1)
    assert len(draft.sessions) == 1


async def test_an_engine_that_does_not_look_still_learns_of_the_loss(servers: Servers) -> None:
    draft = ScriptedDraft()
    server, _ = await serve(servers, draft)
    async with engine(server.address, options=LinkOptions(backoff=QUICK, inbox_messages=4)) as target:
        up = await target.up()
        session = draft.sessions[0]
        for nonce in range(20):
            session.push(Pong(nonce=nonce))
            await eventually(lambda nonce=nonce: target.transport.messages_received == nonce + 2)  # type: ignore[misc]
        assert target.transport.dropped == 16
        session.close()
        await eventually(lambda: len(draft.sessions) == 2)
        events = await asyncio.to_thread(target.transport.receive, 20.0)
        while not any(isinstance(event, LinkUp) for event in events):
            events += await asyncio.to_thread(target.transport.receive, 20.0)
        states = [event for event in events if isinstance(event, LinkUp | LinkDown)]
        assert isinstance(states[0], LinkDown)
        assert states[0].link_id == up.link_id
        assert isinstance(states[-1], LinkUp)
