"""The engine's end of its routers' streams: `DispatchService` over `core.ports.EngineService`."""

import asyncio
import hmac
import logging
from collections.abc import Collection, Sequence
from typing import TypeAlias

import grpc
import grpc.aio

from outrider.core.dispatch import (
    EngineEvent,
    RouterCommand,
    SequenceEnd,
    SequenceErrorCode,
    SequenceFailure,
    SequenceSubmit,
)
from outrider.core.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest, Overloaded, ProtocolError
from outrider.core.ports import EngineService, EngineSession
from outrider.rpc.aio_calls import read_request
from outrider.rpc.dispatch_conversion import DISPATCH_PROTOCOL_VERSION, command_from_proto, event_to_proto
from outrider.rpc.errors import fail
from outrider.v1 import dispatch_pb2 as pb
from outrider.v1.dispatch_pb2_grpc import DispatchServiceServicer

__all__ = ["DispatchServicer"]

_LAST_WORDS_S = 0.25

_logger = logging.getLogger(__name__)

_Context: TypeAlias = "grpc.aio.ServicerContext[pb.ConnectRequest, pb.ConnectResponse]"


class _Unauthenticated(Exception):
    """The router does not know the secret of the cluster."""


class _Stream:
    """One router's stream: whoever writes holds the lock, one task reads."""

    def __init__(self, context: _Context, session: EngineSession, stalled_timeout_s: float) -> None:
        self.context = context
        self.session = session
        self._stalled_timeout_s = stalled_timeout_s
        self._writing = asyncio.Lock()

    async def write(self, events: Sequence[EngineEvent]) -> None:
        """Send the events of one step as one message.

        Raises `EngineUnavailable` when the router has not made room for it for too long.
        """
        message = pb.ConnectResponse(events=[event_to_proto(event) for event in events])
        async with self._writing:
            try:
                async with asyncio.timeout(self._stalled_timeout_s):
                    await self.context.write(message)
            except TimeoutError:
                cause = f"the router has read nothing for {self._stalled_timeout_s:g} s"
                raise EngineUnavailable(cause) from None


class DispatchServicer(DispatchServiceServicer):
    """Serves routers, each with a session of its own, so that a slow one delays nobody else.

    When a stream ends, its session is closed, and with it every sequence that it still has running.
    `dropped` counts malformed commands; a malformed submit ends that sequence as INVALID.
    """

    def __init__(
        self,
        service: EngineService,
        *,
        auth_token: str = "",
        hello_timeout_s: float = 5.0,
        stalled_timeout_s: float = 30.0,
    ) -> None:
        self._service = service
        self._auth_token = auth_token
        self._hello_timeout_s = hello_timeout_s
        self._stalled_timeout_s = stalled_timeout_s
        self.streams = 0
        self.messages_received = 0
        self.dropped = 0

    async def Connect(  # type: ignore[override]  # writes by hand, where the stubs expect a generator
        self, request_iterator: object, context: _Context
    ) -> None:
        """One router's stream, from RouterHello to its end."""
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                first = await read_request(context)
        except TimeoutError:
            fail(context, DeadlineExceeded(f"no RouterHello within {self._hello_timeout_s:g} s"))
            return
        except ProtocolError as error:
            fail(context, error)
            return
        if first is None:
            return
        try:
            stream = self._greet(first, context)
            await self._serve(stream, list(first.commands)[1:])
        except _Unauthenticated:
            context.set_code(grpc.StatusCode.UNAUTHENTICATED)
            context.set_details("hello.auth_token: is not the one of this cluster")
        except Exception as error:  # noqa: BLE001 - becomes a status in one place
            fail(context, error)

    def _greet(self, first: pb.ConnectRequest, context: _Context) -> _Stream:
        """Open a session for the RouterHello in the first message."""
        if not first.commands or first.commands[0].WhichOneof("command") != "hello":
            raise ProtocolError("hello: a stream starts with it")
        hello = first.commands[0].hello
        if hello.protocol_version != DISPATCH_PROTOCOL_VERSION:
            raise ProtocolError(f"hello.protocol_version: {hello.protocol_version} is not {DISPATCH_PROTOCOL_VERSION}")
        if not hmac.compare_digest(hello.auth_token.encode(), self._auth_token.encode()):
            raise _Unauthenticated
        self.messages_received += 1
        return _Stream(context, self._service.connect(hello.router_id), self._stalled_timeout_s)

    async def _serve(self, stream: _Stream, commands: list[pb.RouterCommand]) -> None:
        self.streams += 1
        tasks: list[asyncio.Task[None]] = []
        try:
            await stream.write([stream.session.hello])
            await self._apply(stream, commands)
            tasks = [asyncio.create_task(work(stream)) for work in (self._read_all, self._write_all)]
            done, unfinished = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            try:
                for task in done:
                    task.result()
            except EngineUnavailable:
                await self._last_words(unfinished)
                raise
        finally:
            self.streams -= 1
            stream.session.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _last_words(self, unfinished: Collection[asyncio.Task[None]]) -> None:
        """Let the router read why each of its sequences has ended before the stream does.

        A write of its own that meets the end of a stream hides all that it has not read by then, the
        status included.
        """
        if unfinished:
            await asyncio.wait(unfinished, timeout=_LAST_WORDS_S)
        await asyncio.sleep(_LAST_WORDS_S)

    async def _write_all(self, stream: _Stream) -> None:
        while events := await stream.session.receive():
            await stream.write(events)

    async def _read_all(self, stream: _Stream) -> None:
        while (message := await read_request(stream.context)) is not None:
            self.messages_received += 1
            await self._apply(stream, message.commands)

    async def _apply(self, stream: _Stream, messages: Sequence[pb.RouterCommand]) -> None:
        """Hand the commands of one message to the engine; sequences that it cannot take end at once."""
        commands: list[RouterCommand] = []
        refused: list[EngineEvent] = []
        for message in messages:
            try:
                commands.append(command_from_proto(message))
            except InvalidRequest as error:
                refused.append(_failed(message.submit.stream_key, SequenceErrorCode.INVALID, str(error)))
            except ProtocolError as error:
                self.dropped += 1
                _logger.warning("dropped a command from %s: %s", stream.context.peer(), error)
        if commands:
            try:
                stream.session.send(commands)
            except Overloaded:
                refused.extend(self._apply_singly(stream, commands))
        if refused:
            await stream.write(refused)

    def _apply_singly(self, stream: _Stream, commands: list[RouterCommand]) -> list[EngineEvent]:
        """What still fits, one by one: an abort must not get lost behind a submit that is too much."""
        refused: list[EngineEvent] = []
        for command in commands:
            try:
                stream.session.send([command])
            except Overloaded as error:
                if isinstance(command, SequenceSubmit):
                    refused.append(_failed(command.stream_key, SequenceErrorCode.OVERLOADED, str(error)))
                else:
                    self.dropped += 1
                    _logger.warning("no room for %s from %s", command, stream.context.peer())
        return refused


def _failed(stream_key: int, code: SequenceErrorCode, message: str) -> SequenceEnd:
    return SequenceEnd(stream_key=stream_key, failure=SequenceFailure(code=code, message=message))
