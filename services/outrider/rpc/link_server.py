"""The draft's end of its links: `SpeculationService` over `core.ports.DraftService`."""

import asyncio
import hmac
import logging
from collections.abc import Sequence
from typing import TypeAlias

import grpc
import grpc.aio

from outrider.core.errors import CompatibilityError, DeadlineExceeded, ProtocolError
from outrider.core.link import PROTOCOL_VERSION, Capability, DraftEvent, Drain, Goodbye, LinkError, LinkErrorCode
from outrider.core.ports import DraftService, DraftSession
from outrider.rpc.aio_calls import read_request
from outrider.rpc.counters import LinkCounters
from outrider.rpc.errors import fail
from outrider.rpc.link_conversion import LinkIdentity, LinkReader, LinkWriter
from outrider.rpc.link_target_conversion import hello_from_proto
from outrider.v1 import speculation_pb2 as pb
from outrider.v1.speculation_pb2_grpc import SpeculationServiceServicer

__all__ = ["SpeculationServicer"]

_logger = logging.getLogger(__name__)

_Context: TypeAlias = "grpc.aio.ServicerContext[pb.LinkRequest, pb.LinkResponse]"


class _Refused(Exception):
    def __init__(self, code: LinkErrorCode, message: str) -> None:
        super().__init__(message)
        self.error = LinkError(code=code, message=message)


class _Link:
    """One greeted link: whoever writes holds the lock, one task reads."""

    def __init__(
        self, context: _Context, session: DraftSession, reader: LinkReader, writer: LinkWriter, counters: LinkCounters
    ) -> None:
        self.context = context
        self.session = session
        self.reader = reader
        self._writer = writer
        self._counters = counters
        self._writing = asyncio.Lock()

    async def write(self, events: Sequence[DraftEvent]) -> None:
        """Send events; waits while the target does not read."""
        async with self._writing:
            for message in self._writer.responses(events):
                await self.context.write(message)
                self._counters.messages_sent += 1


class SpeculationServicer(SpeculationServiceServicer):
    """Serves links: greets, checks, hands events both ways, and closes the session when a link ends."""

    def __init__(self, service: DraftService, *, auth_token: str = "", hello_timeout_s: float = 5.0) -> None:
        self._service = service
        self._auth_token = auth_token
        self._hello_timeout_s = hello_timeout_s
        self._links: set[_Link] = set()
        self._drain_reason: str | None = None
        self.counters = LinkCounters()

    @property
    def links(self) -> int:
        """Greeted links now."""
        return len(self._links)

    async def drain(self, reason: str) -> None:
        """Tell every target, now and later, that this draft is leaving. Links go on until somebody ends them."""
        self._drain_reason = reason
        await asyncio.gather(*(link.write([Drain(reason=reason)]) for link in self._links), return_exceptions=True)

    async def Link(  # type: ignore[override]  # writes by hand, where the stubs expect a generator
        self, request_iterator: object, context: _Context
    ) -> None:
        """One link, from Hello to its end."""
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                first = await read_request(context)
        except TimeoutError:
            fail(context, DeadlineExceeded(f"no Hello within {self._hello_timeout_s:g} s"))
            return
        except ProtocolError as error:
            fail(context, error)
            return
        if first is None:
            return
        self.counters.messages_received += 1
        try:
            await self._serve(self._greet(first, context))
        except _Refused as refusal:
            _logger.warning("link from %s refused: %s", context.peer(), refusal)
            await self._refuse(first.header, refusal, context)
        except Exception as error:  # noqa: BLE001 - becomes a status in one place
            fail(context, error)

    def _greet(self, first: pb.LinkRequest, context: _Context) -> _Link:
        """Open a session for the Hello in the first message. Raises `_Refused`."""
        header = first.header
        if header.protocol_version != PROTOCOL_VERSION:
            raise _Refused(LinkErrorCode.VERSION, f"version {header.protocol_version} is not {PROTOCOL_VERSION}")
        if len(first.events) != 1 or first.events[0].WhichOneof("event") != "hello" or header.link_id == 0:
            raise _Refused(LinkErrorCode.MALFORMED, "a link starts with one Hello under a link id")
        hello = hello_from_proto(first.events[0].hello, header)
        if not hmac.compare_digest(hello.auth_token.encode(), self._auth_token.encode()):
            raise _Refused(LinkErrorCode.UNAUTHENTICATED, "auth_token: is not the one of this cluster")
        try:
            session = self._service.connect(hello)
        except CompatibilityError as error:
            raise _Refused(LinkErrorCode.VOCABULARY, str(error)) from error
        identity = LinkIdentity(
            link_id=hello.link_id, engine_epoch=hello.engine_epoch, draft_incarnation=session.ack.incarnation
        )
        reader = LinkReader(identity, max_unfinished_tokens=4 * hello.max_model_len, after_number=header.message_number)
        writer = LinkWriter(identity, packs_tables=Capability.PACKED_TABLES in hello.capabilities)
        return _Link(context, session, reader, writer, self.counters)

    async def _refuse(self, header: pb.LinkHeader, refusal: _Refused, context: _Context) -> None:
        """Send the reason as a message; the stream ends after it."""
        identity = LinkIdentity(link_id=header.link_id, engine_epoch=header.engine_epoch, draft_incarnation=0)
        for message in LinkWriter(identity).responses([refusal.error]):
            await context.write(message)
            self.counters.messages_sent += 1

    async def _serve(self, link: _Link) -> None:
        reader = asyncio.create_task(self._read_all(link))
        self._links.add(link)
        try:
            await link.write([link.session.ack])
            if self._drain_reason is not None:
                await link.write([Drain(reason=self._drain_reason)])
            while events := await link.session.receive():
                await link.write(events)
            if reader.done() and (problem := reader.result()):
                await link.write([LinkError(code=LinkErrorCode.MALFORMED, message=problem)])
        finally:
            self._links.discard(link)
            link.session.close()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read_all(self, link: _Link) -> str:
        """Hand over what the target says until Goodbye or the end, then close the session.

        Returns why the draft has to end the link; nothing when the target did.
        """
        try:
            while (message := await read_request(link.context)) is not None:
                self.counters.messages_received += 1
                read = link.reader.target_events(message)
                self.counters.dropped += len(read.problems)
                for problem in read.problems:
                    _logger.debug("dropped from %s: %s", link.context.peer(), problem)
                if read.events:
                    link.session.send(read.events)
                if any(isinstance(event, Goodbye) for event in read.events):
                    return ""
            _logger.warning("the target at %s left without Goodbye", link.context.peer())
        except ProtocolError as error:  # swamped: what was lost is sent anew on the next link
            return str(error)
        finally:
            link.session.close()
        return ""
