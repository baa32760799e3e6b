"""One stream from a target to a draft, from Hello to its end. Used on the event loop."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from outrider.core.errors import ConfigError, ProtocolError
from outrider.core.link import DraftEvent, Drain, Goodbye, Hello, HelloAck, LinkError, TargetEvent
from outrider.rpc.aio_calls import describe, is_being_cancelled, open_stream
from outrider.rpc.channel_options import Keepalive, data_plane_channel
from outrider.rpc.counters import LinkCounters
from outrider.rpc.link_conversion import LinkIdentity, LinkReader, LinkWriter
from outrider.rpc.link_draft_conversion import draft_event_from_proto
from outrider.rpc.link_inbox import Outbox
from outrider.rpc.tls import TlsFiles
from outrider.v1 import speculation_pb2 as pb
from outrider.v1.speculation_pb2_grpc import SpeculationServiceStub

__all__ = ["LinkLost", "LinkStream", "StreamOptions"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Time limits of one stream, seconds."""

    hello_timeout_s: float = 3.0
    """From the first connection attempt to HelloAck."""
    goodbye_timeout_s: float = 1.0
    """From Goodbye until the stream is cut."""
    keepalive: Keepalive = field(default_factory=Keepalive)
    tls: TlsFiles | None = None
    """Mutual TLS; None: plain text."""

    def __post_init__(self) -> None:
        for name in ("hello_timeout_s", "goodbye_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")


class LinkLost(Exception):
    """The stream is gone. `refused`: the draft said no, and will say so again."""

    def __init__(self, cause: str, *, refused: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.refused = refused


class LinkStream:
    """A greeted stream. `connect` makes it, `run` works until it ends."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: "grpc.aio.StreamStreamCall[pb.LinkRequest, pb.LinkResponse]",
        ack: HelloAck,
        reader: LinkReader,
        writer: LinkWriter,
        options: StreamOptions,
        counters: LinkCounters,
    ) -> None:
        self.ack = ack
        self._channel = channel
        self._call = call
        self._options = options
        self._counters = counters
        self._reader = reader
        self._writer = writer
        self._goodbye = ""
        self._draining = ""
        self._cut = ""

    @classmethod
    async def connect(cls, address: str, hello: Hello, options: StreamOptions, counters: LinkCounters) -> "LinkStream":
        """Connect and greet. Raises `LinkLost`."""
        try:
            channel = data_plane_channel(address, options.keepalive, options.tls)
        except ConfigError as error:
            raise LinkLost(str(error), refused=True) from error
        try:
            async with asyncio.timeout(options.hello_timeout_s):
                return await cls._greet(channel, hello, options, counters)
        except TimeoutError:
            await channel.close(None)
            raise LinkLost(f"no answer to Hello within {options.hello_timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            await channel.close(None)
            raise LinkLost(describe(error)) from error
        except BaseException:
            await channel.close(None)
            raise

    @classmethod
    async def _greet(
        cls, channel: grpc.aio.Channel, hello: Hello, options: StreamOptions, counters: LinkCounters
    ) -> "LinkStream":
        unknown = LinkIdentity(link_id=hello.link_id, engine_epoch=hello.engine_epoch, draft_incarnation=0)
        call = open_stream(SpeculationServiceStub(channel).Link)
        with contextlib.suppress(asyncio.InvalidStateError):  # it has ended already; `read` knows why
            await call.write(LinkWriter(unknown).hello(hello))
            counters.messages_sent += 1
        response = await call.read()
        if not isinstance(response, pb.LinkResponse):
            raise LinkLost("the stream ended before HelloAck")
        counters.messages_received += 1
        ack = _read_ack(response, hello)
        identity = LinkIdentity(
            link_id=hello.link_id, engine_epoch=hello.engine_epoch, draft_incarnation=ack.incarnation
        )
        reader = LinkReader(identity, after_number=response.header.message_number)
        return cls(channel, call, ack, reader, LinkWriter(identity, messages=1), options, counters)

    def leave(self, outbox: Outbox, reason: str) -> None:
        """Send what is queued, then Goodbye; cut the stream if the draft does not end it in time."""
        self._goodbye = reason
        outbox.close()
        asyncio.get_running_loop().call_later(self._options.goodbye_timeout_s, self._cut_off, reason)

    async def run(self, outbox: Outbox, deliver: Callable[[list[DraftEvent]], bool]) -> LinkLost:
        """Send from `outbox` and hand over what arrives, until the stream ends; say why it did."""
        sender = asyncio.create_task(self._send_all(outbox))
        try:
            return LinkLost(await self._receive_all(deliver))
        except LinkLost as loss:
            return loss
        except grpc.aio.AioRpcError as error:
            return LinkLost(self._draining or describe(error))
        except asyncio.CancelledError:
            if is_being_cancelled() or not self._cut:
                raise
            return LinkLost(self._cut)
        except Exception:
            _logger.exception("reading from a draft failed")
            return LinkLost("internal error")
        finally:
            outbox.close()
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            await self._channel.close(None)

    async def _receive_all(self, deliver: Callable[[list[DraftEvent]], bool]) -> str:
        while isinstance(message := await self._call.read(), pb.LinkResponse):
            self._counters.messages_received += 1
            read = self._reader.draft_events(message)
            self._counters.dropped += len(read.problems)
            for problem in read.problems:
                _logger.debug("dropped from a draft: %s", problem)
            events: list[DraftEvent] = []
            for event in read.events:
                if isinstance(event, LinkError):
                    raise LinkLost(f"the draft ended the link: {event.code.value}: {event.message}")
                if isinstance(event, HelloAck):
                    self._counters.dropped += 1
                    continue
                if isinstance(event, Drain):
                    self._draining = f"the draft drained: {event.reason}"
                events.append(event)
            if events and not deliver(events):
                self._counters.dropped += len(events)
        return self._goodbye or self._draining or "the stream ended without Drain"

    async def _send_all(self, outbox: Outbox) -> None:
        try:
            while batches := await outbox.take():
                # Several steps that wait travel together: the order is all that counts.
                await self._send([event for batch in batches for event in batch])
            await self._send([Goodbye(reason=self._goodbye)])
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream has ended; whoever reads it learns why.
            outbox.close()
        except Exception:
            # Without a sender the link is useless: cut it, and everything starts afresh on the next.
            _logger.exception("sending to a draft failed")
            self._cut_off("internal error")

    def _cut_off(self, cause: str) -> None:
        self._cut = cause
        self._call.cancel()

    async def _send(self, events: list[TargetEvent]) -> None:
        for message in self._writer.requests(events):
            await self._call.write(message)
            self._counters.messages_sent += 1


def _read_ack(response: pb.LinkResponse, hello: Hello) -> HelloAck:
    if response.header.link_id != hello.link_id or not response.events:
        raise LinkLost("the answer to Hello does not belong to it", refused=True)
    try:
        event = draft_event_from_proto(response.events[0])
    except ProtocolError as error:
        raise LinkLost(f"the answer to Hello is malformed: {error}", refused=True) from error
    if isinstance(event, LinkError):
        raise LinkLost(f"refused: {event.code.value}: {event.message}", refused=True)
    if not isinstance(event, HelloAck):
        raise LinkLost("the draft did not answer Hello with HelloAck", refused=True)
    return event
