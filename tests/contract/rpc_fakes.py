"""Scripted sides of the ports, servers that end with their test, and a TCP proxy that can fall silent."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio

from outrider.core.dispatch import EngineEvent, EngineHello, EngineReport, EngineStatus, ReportRequest, RouterCommand
from outrider.core.errors import CompatibilityError, EngineUnavailable, Overloaded, ProtocolError
from outrider.core.link import Capability, DraftEvent, Hello, HelloAck, Ping, Pong, TargetEvent
from outrider.core.mailbox import AsyncMailbox
from outrider.rpc.channel_options import Keepalive
from outrider.rpc.health import Health
from outrider.rpc.server import RunningServer, ServerOptions, start_server


class RealClock:
    def now(self) -> float:
        return time.monotonic()


async def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until a condition on plain state holds. The time-out is a failure, never a measure."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - plain state of the code under test has no event
            await asyncio.sleep(0.01)


HELLO = Hello(
    engine_id="engine-0",
    engine_epoch=3,
    link_id=0,
    target_model="target",
    vocab_size=100,
    tokenizer_fingerprint=b"words",
    max_num_draft_tokens=8,
    max_model_len=10_000,
    max_num_seqs=4,
)


class ScriptedDraftSession:
    """Records what the target says; answers Ping; sends what the test pushes."""

    def __init__(self, hello: Hello, incarnation: int) -> None:
        self.hello = hello
        self.ack = HelloAck(
            incarnation=incarnation,
            draft_model="draft",
            vocab_size=100,
            tokenizer_fingerprint=b"words",
            max_model_len=5000,
            kv_capacity_tokens=10**6,
            step_ms=1.25,
            capabilities=frozenset({Capability.SEQUENTIAL}),
        )
        self.received: list[TargetEvent] = []
        self.closed = False
        self.swamped = False
        self._outbox: AsyncMailbox[DraftEvent] = AsyncMailbox(10_000)

    def push(self, *events: DraftEvent) -> None:
        assert self._outbox.put(events)

    def send(self, events: Sequence[TargetEvent]) -> None:
        if self.swamped:
            raise ProtocolError("the draft is swamped")
        self.received.extend(events)
        self._outbox.put([Pong(nonce=event.nonce) for event in events if isinstance(event, Ping)])

    async def receive(self) -> list[DraftEvent]:
        return await self._outbox.take()

    def close(self) -> None:
        self.closed = True
        self._outbox.close()


class ScriptedDraft:
    """A draft replica without a model."""

    def __init__(self, incarnation: int = 1) -> None:
        self.incarnation = incarnation
        self.sessions: list[ScriptedDraftSession] = []

    def connect(self, hello: Hello) -> ScriptedDraftSession:
        if hello.tokenizer_fingerprint != b"words":
            raise CompatibilityError("the tokenizers differ at id 7")
        session = ScriptedDraftSession(hello, self.incarnation)
        self.sessions.append(session)
        return session


class ScriptedEngineSession:
    """Records commands; sends what the test pushes; answers a report request."""

    def __init__(self, router_id: str, hello: EngineHello) -> None:
        self.router_id = router_id
        self.hello = hello
        self.received: list[RouterCommand] = []
        self.closed = False
        self.room = 10**6
        self._failure: str | None = None
        self._outbox: AsyncMailbox[EngineEvent] = AsyncMailbox(10_000)

    def push(self, *events: EngineEvent) -> None:
        assert self._outbox.put(events)

    def fail(self, cause: str) -> None:
        self._failure = cause
        self._outbox.close()

    def send(self, commands: Sequence[RouterCommand]) -> None:
        if self._failure is not None:
            raise EngineUnavailable(self._failure)
        if len(commands) > self.room:
            raise Overloaded("the engine's queue is full", retry_after_s=1.0)
        self.room -= len(commands)
        self.received.extend(commands)
        for command in commands:
            if isinstance(command, ReportRequest):
                self.push(EngineReport(nonce=command.nonce, status=EngineStatus(engine_id="engine-0", ready=True)))

    async def receive(self) -> list[EngineEvent]:
        events = await self._outbox.take()
        if not events and self._failure is not None:
            raise EngineUnavailable(self._failure)
        return events

    def close(self) -> None:
        self.closed = True
        self._outbox.close()


class ScriptedEngine:
    """An engine without a model."""

    def __init__(self) -> None:
        self.sessions: list[ScriptedEngineSession] = []

    def connect(self, router_id: str) -> ScriptedEngineSession:
        hello = EngineHello(
            engine_id="engine-0", engine_epoch=2, model="target", max_model_len=10_000, kv_capacity_tokens=50_000
        )
        self.sessions.append(ScriptedEngineSession(router_id, hello))
        return self.sessions[-1]


class TcpProxy:
    """Forwards bytes between its own port and a target port until told to fall silent or to cut."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._forwarding = asyncio.Event()
        self._forwarding.set()
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def silence(self) -> None:
        """Keep every connection open and carry nothing more."""
        self._forwarding.clear()

    def resume(self) -> None:
        self._forwarding.set()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # lets aborted transports close their sockets

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._tasks.append(asyncio.create_task(self._carry(reader, writer)))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._forwarding.wait()
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers.append(up_writer)
        await asyncio.gather(self._pump(reader, up_writer), self._pump(up_reader, writer))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                await self._forwarding.wait()
                sink.write(data)
                await sink.drain()
        sink.close()


@contextlib.asynccontextmanager
async def proxied(target_port: int) -> AsyncIterator[TcpProxy]:
    proxy = TcpProxy(target_port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


class HealthOnly:
    """The health service as a door has it on its class."""

    def __init__(self, health: Health) -> None:
        self._health = health

    async def Check(self, request: Any, context: Any) -> Any:
        return await self._health.check(request, context)

    async def List(self, request: Any, context: Any) -> Any:
        return await self._health.list_services(request, context)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in self._health.watch(request, context):
            yield response


class Servers:
    """Starts servers on free loopback ports and stops every one of them at the end of a test."""

    def __init__(self) -> None:
        self._running: list[RunningServer] = []

    async def start(
        self, *services: Callable[[grpc.aio.Server], None], port: int = 0, keepalive: Keepalive | None = None
    ) -> RunningServer:
        options = ServerOptions(port=port, grace_s=0.0, keepalive=keepalive or Keepalive())
        server = await start_server(services, options)
        self._running.append(server)
        return server

    async def stop(self) -> None:
        for server in self._running:
            await server.stop()
