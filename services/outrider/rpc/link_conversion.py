"""Messages of a link: headers, what fits into one message, and reading with garbage counted, not fatal."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.core import link
from outrider.core.errors import ProtocolError
from outrider.rpc.link_draft_conversion import draft_event_from_proto, draft_event_to_proto
from outrider.rpc.link_target_conversion import hello_to_proto, target_event_from_proto, target_event_to_proto
from outrider.rpc.message_groups import in_groups
from outrider.rpc.token_chunks import TextAssembler
from outrider.v1 import speculation_pb2 as pb

__all__ = [
    "LinkIdentity",
    "LinkReader",
    "LinkWriter",
    "ReadEvents",
]

E = TypeVar("E")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkIdentity:
    """What every header of an established link says."""

    link_id: int
    engine_epoch: int
    draft_incarnation: int

    def header(self, message_number: int) -> pb.LinkHeader:
        """The header of a message; numbers count from 1 in each direction."""
        return pb.LinkHeader(
            protocol_version=link.PROTOCOL_VERSION,
            link_id=self.link_id,
            engine_epoch=self.engine_epoch,
            draft_incarnation=self.draft_incarnation,
            message_number=message_number,
        )

    def matches(self, header: pb.LinkHeader) -> bool:
        """False for a message of another link, engine epoch, draft incarnation or protocol."""
        return (
            header.protocol_version == link.PROTOCOL_VERSION
            and header.link_id == self.link_id
            and header.engine_epoch == self.engine_epoch
            and header.draft_incarnation == self.draft_incarnation
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEvents(Generic[E]):
    """What one message brought."""

    events: list[E]
    problems: tuple[str, ...] = ()
    """Why parts of it, or all of it, were dropped; one entry per dropped part."""


class LinkWriter:
    """Makes the messages of one side of a link and numbers them, from `messages` + 1 on."""

    def __init__(self, identity: LinkIdentity, *, messages: int = 0, packs_tables: bool = False) -> None:
        """`packs_tables`: the other side reads outcome tables whose outcomes are columns."""
        self._identity = identity
        self._packs_tables = packs_tables
        self.messages = messages

    def hello(self, hello: link.Hello) -> pb.LinkRequest:
        """The first message of the target."""
        return self._request([pb.TargetEvent(hello=hello_to_proto(hello))])

    def requests(self, events: Iterable[link.TargetEvent], traceparent: str = "") -> Iterator[pb.LinkRequest]:
        """The target's messages: one, unless the events are larger than `MAX_GROUP_BYTES`."""
        converted = [message for event in events for message in target_event_to_proto(event)]
        return (self._request(group, traceparent) for group in in_groups(converted))

    def responses(self, events: Iterable[link.DraftEvent]) -> Iterator[pb.LinkResponse]:
        """The draft's messages, likewise."""
        packs = self._packs_tables
        converted = [message for event in events for message in draft_event_to_proto(event, packs_tables=packs)]
        return (self._response(group) for group in in_groups(converted))

    def _request(self, events: Sequence[pb.TargetEvent], traceparent: str = "") -> pb.LinkRequest:
        self.messages += 1
        return pb.LinkRequest(header=self._identity.header(self.messages), events=events, traceparent=traceparent)

    def _response(self, events: Sequence[pb.DraftEvent]) -> pb.LinkResponse:
        self.messages += 1
        return pb.LinkResponse(header=self._identity.header(self.messages), events=events)


class LinkReader:
    """Reads the messages of the other side. Counts and drops what does not belong or is malformed.

    A message whose number is not above the last one (a duplicate) is dropped too.
    """

    def __init__(self, identity: LinkIdentity, *, max_unfinished_tokens: int = 0, after_number: int = 0) -> None:
        self._identity = identity
        self._assembler = TextAssembler(max_unfinished_tokens)
        self._last_number = after_number

    def target_events(self, message: pb.LinkRequest) -> ReadEvents[link.TargetEvent]:
        """The events that the draft can apply, in order."""
        if problem := self._stranger(message.header):
            return ReadEvents(events=[], problems=(problem,))
        events: list[link.TargetEvent] = []
        problems: list[str] = []
        for one in message.events:
            try:
                event = target_event_from_proto(one, self._assembler)
            except ProtocolError as error:
                problems.append(str(error))
            else:
                if event is not None:
                    events.append(event)
        return ReadEvents(events=events, problems=tuple(problems))

    def draft_events(self, message: pb.LinkResponse) -> ReadEvents[link.DraftEvent]:
        """The events that the target can apply, in order."""
        if problem := self._stranger(message.header):
            return ReadEvents(events=[], problems=(problem,))
        events: list[link.DraftEvent] = []
        problems: list[str] = []
        for one in message.events:
            try:
                events.append(draft_event_from_proto(one))
            except ProtocolError as error:
                problems.append(str(error))
        return ReadEvents(events=events, problems=tuple(problems))

    def _stranger(self, header: pb.LinkHeader) -> str:
        """Why the whole message is dropped; empty when it belongs here."""
        if not self._identity.matches(header):
            return "header: of another link, epoch, incarnation or protocol"
        if header.message_number <= self._last_number:
            return f"header.message_number: {header.message_number} after {self._last_number}"
        self._last_number = header.message_number
        return ""
