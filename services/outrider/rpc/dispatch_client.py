"""The router's end of its stream to an engine: a remote `core.ports.EngineSession`."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence

import grpc
import grpc.aio

from outrider.core.dispatch import (
    EngineEvent,
    EngineHello,
    RouterCommand,
    SequenceAbort,
    SequenceEnd,
    SequenceErrorCode,
    SequenceFailure,
)
from outrider.core.errors import ConfigError, EngineUnavailable, InvalidRequest, Overloaded, ProtocolError
from outrider.core.mailbox import AsyncMailbox
from outrider.rpc.aio_calls import describe, open_stream
from outrider.rpc.channel_options import Keepalive, data_plane_channel
from outrider.rpc.dispatch_conversion import DISPATCH_PROTOCOL_VERSION, command_to_proto, event_from_proto
from outrider.rpc.errors import domain_error
from outrider.rpc.message_groups import in_groups
from outrider.rpc.tls import TlsFiles
from outrider.v1 import dispatch_pb2 as pb
from outrider.v1.dispatch_pb2_grpc import DispatchServiceStub

__all__ = ["GrpcEngineSession"]

_logger = logging.getLogger(__name__)

_QUEUE_COMMANDS = 4096
_QUEUE_MESSAGES = 256  # arrived and not yet taken; more stay in flow control
_RETRY_AFTER_S = 0.5


class GrpcEngineSession:
    """An `EngineSession` over one stream. `connect` makes it; it does not reconnect by itself.

    Every sequence of this router on that engine shares it. When it breaks, `receive` raises
    `EngineUnavailable` with the cause, now and ever after.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: "grpc.aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse]",
        hello: EngineHello,
        early: list[EngineEvent],
    ) -> None:
        self._hello = hello
        self._channel = channel
        self._call = call
        self._outbox: AsyncMailbox[pb.RouterCommand] = AsyncMailbox(_QUEUE_COMMANDS)
        self._inbox: deque[list[EngineEvent]] = deque([early] if early else [])
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._failure: str | None = None
        self._shutting: asyncio.Task[None] | None = None
        self._tasks = [asyncio.create_task(self._read_all()), asyncio.create_task(self._send_all())]
        self.dropped = 0
        """Malformed events of the engine."""

    @classmethod
    async def connect(
        cls,
        address: str,
        router_id: str,
        timeout_s: float,
        *,
        auth_token: str = "",
        keepalive: Keepalive | None = None,
        tls: TlsFiles | None = None,
    ) -> "GrpcEngineSession":
        """Connect and greet. Raises `EngineUnavailable` naming the cause."""
        try:
            channel = data_plane_channel(address, keepalive or Keepalive(), tls)
        except ConfigError as error:
            raise EngineUnavailable(str(error)) from error
        try:
            async with asyncio.timeout(timeout_s):
                call = open_stream(DispatchServiceStub(channel).Connect)
                hello = pb.RouterHello(
                    router_id=router_id, protocol_version=DISPATCH_PROTOCOL_VERSION, auth_token=auth_token
                )
                with contextlib.suppress(asyncio.InvalidStateError):  # it has ended already; `read` knows why
                    await call.write(pb.ConnectRequest(commands=[pb.RouterCommand(hello=hello)]))
                first, early = _greeting(await call.read())
                return cls(channel, call, first, early)
        except TimeoutError:
            cause = f"{address}: no answer within {timeout_s:g} s"
        except grpc.aio.AioRpcError as error:
            cause = f"{address}: {describe(error)}"
        except ProtocolError as error:
            cause = f"{address}: {error}"
        except BaseException:
            await channel.close(None)
            raise
        await channel.close(None)
        raise EngineUnavailable(cause)

    @property
    def hello(self) -> EngineHello:
        """Who answers."""
        return self._hello

    def send(self, commands: Sequence[RouterCommand]) -> None:
        """Queue commands in order; never blocks.

        Raises `EngineUnavailable` when the stream is broken, `Overloaded` when the queue is full.
        """
        if self._failure is not None:
            raise EngineUnavailable(self._failure)
        try:
            messages = [command_to_proto(command) for command in commands]
        except ValueError as error:  # a number that its field cannot hold
            raise InvalidRequest("command", str(error)) from error
        if not self._outbox.put(messages):
            raise Overloaded(f"the queue to engine {self._hello.engine_id} is full", retry_after_s=_RETRY_AFTER_S)

    async def receive(self) -> list[EngineEvent]:
        """Wait for the engine's next events, and take all that have arrived. May be cancelled at no loss.

        Raises `EngineUnavailable` naming the cause when the engine is gone.
        """
        while not self._inbox:
            if self._failure is not None:
                raise EngineUnavailable(self._failure)
            self._arrived.clear()
            await self._arrived.wait()
        taken = [event for events in self._inbox for event in events]
        self._inbox.clear()
        self._room.set()
        return taken

    def close(self) -> None:
        """Leave: the engine aborts what this router still has running. Idempotent."""
        self._inbox.clear()
        self._fail("the session is closed")

    async def wait_closed(self) -> None:
        """Return once a closed or broken session has let go of its connection."""
        while self._shutting is None:
            self._arrived.clear()
            await self._arrived.wait()
        await self._shutting

    async def _read_all(self) -> None:
        cause = "the engine ended the stream"
        try:
            while isinstance(message := await self._call.read(), pb.ConnectResponse):
                while len(self._inbox) >= _QUEUE_MESSAGES:
                    self._room.clear()
                    await self._room.wait()
                if events := [event for one in message.events for event in self._converted(one)]:
                    self._inbox.append(events)
                    self._arrived.set()
        except grpc.aio.AioRpcError as error:
            cause = self._cause(error)
        except Exception:
            _logger.exception("reading from engine %s failed", self._hello.engine_id)
            cause = "internal error"
        self._fail(cause)

    def _cause(self, error: grpc.aio.AioRpcError) -> str:
        """What the engine said at the end; when it said nothing, that its first rank is out of reach."""
        said = domain_error(error)
        if isinstance(said, EngineUnavailable) and said.cause != error.details():
            return said.cause
        return f"the connection to rank 0 of engine {self._hello.engine_id} is lost ({describe(error)})"

    def _converted(self, message: pb.EngineEvent) -> list[EngineEvent]:
        """The event; for a malformed one, the failure of its sequence, which would otherwise wait for ever."""
        try:
            return [event_from_proto(message)]
        except ProtocolError as error:
            self.dropped += 1
            _logger.warning("dropped an event of engine %s: %s", self._hello.engine_id, error)
            kind = message.WhichOneof("event")
            if kind not in ("delta", "end"):
                return []
            stream_key = message.delta.stream_key if kind == "delta" else message.end.stream_key
            with contextlib.suppress(EngineUnavailable, Overloaded):
                self.send([SequenceAbort(stream_key=stream_key)])
            failure = SequenceFailure(code=SequenceErrorCode.UNAVAILABLE, message=f"malformed event: {error}")
            return [SequenceEnd(stream_key=stream_key, failure=failure)]

    async def _send_all(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader learns why
            while messages := await self._outbox.take():
                for group in in_groups(messages):
                    await self._call.write(pb.ConnectRequest(commands=group))

    def _fail(self, cause: str) -> None:
        if self._failure is None:
            self._failure = cause
            self._outbox.close()
            self._shutting = asyncio.create_task(self._shut())
            self._arrived.set()

    async def _shut(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._call.cancel()
        await self._channel.close(None)


def _greeting(message: object) -> tuple[EngineHello, list[EngineEvent]]:
    """EngineHello and what came with it. Raises `ProtocolError`."""
    events = [event_from_proto(one) for one in message.events] if isinstance(message, pb.ConnectResponse) else []
    if not events or not isinstance(events[0], EngineHello):
        raise ProtocolError("the engine did not start with its hello")
    return events[0], events[1:]
