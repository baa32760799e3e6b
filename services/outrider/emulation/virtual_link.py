"""A draft replica and its links in virtual time: the real `Drafter`, driven as its thread drives it."""

from collections.abc import Sequence
from dataclasses import replace

from outrider.core.link import Hello, LinkEvent, LinkUp, TargetEvent
from outrider.draft.config import DraftConfig
from outrider.draft.drafter import Drafter, Outbound
from outrider.emulation.mailbox import VirtualMailbox
from outrider.emulation.virtual_time import VirtualTime

__all__ = ["VirtualDraft", "VirtualLink"]


class VirtualLink:
    """Implements `DraftTransport` for the actor of one engine loop. The network is never full or down."""

    def __init__(
        self, link_id: int, outbox: VirtualMailbox[tuple[int, tuple[TargetEvent, ...]]], *, hop_s: float
    ) -> None:
        self.inbox: VirtualMailbox[tuple[LinkEvent, ...]] = VirtualMailbox(outbox.time, hop_s=hop_s)
        self._link_id = link_id
        self._outbox = outbox

    def send(self, events: Sequence[TargetEvent]) -> bool:
        """Send events as one message; always True."""
        if events:
            self._outbox.put((self._link_id, tuple(events)))
        return True

    def receive(self, timeout_s: float) -> list[LinkEvent]:
        """Everything that has arrived, waiting at most `timeout_s` for the first."""
        return [event for message in self.inbox.take(timeout_s) for event in message]

    def close(self) -> None:
        """Nothing to do: the simulation ends as a whole."""


class VirtualDraft:
    """One draft for any number of engine loops. `live` is the body of its actor."""

    def __init__(self, drafter: Drafter, config: DraftConfig, time: VirtualTime, *, hop_s: float) -> None:
        self.drafter = drafter
        self._config = config
        self._hop_s = hop_s
        self._inbox: VirtualMailbox[tuple[int, tuple[TargetEvent, ...]]] = VirtualMailbox(time, hop_s=hop_s)
        self._links: dict[int, tuple[Hello, VirtualLink]] = {}

    def link(self, hello: Hello) -> VirtualLink:
        """A transport for one engine loop; its link comes up when the draft starts. Before the simulation."""
        link_id = len(self._links) + 1
        link = VirtualLink(link_id, self._inbox, hop_s=self._hop_s)
        self._links[link_id] = (replace(hello, link_id=link_id), link)
        return link

    def live(self) -> None:
        """Warm up, greet every engine, and draft for ever."""
        self.drafter.warm_up()
        for link_id, (hello, link) in self._links.items():
            ack = self.drafter.connect(link_id, hello)
            link.inbox.put((LinkUp(link_id=link_id, address="virtual:1", hello=ack),))
        while True:
            self._take_in(0.0 if self.drafter.has_work else self._config.housekeeping_interval_s)
            if self.drafter.has_work:
                self._send_out(self.drafter.step(lambda: self._take_in(0.0)))
            else:
                self.drafter.tick()
                self._send_out(self.drafter.flush())

    def _take_in(self, timeout_s: float) -> None:
        """Apply what has arrived; answers that need no computing leave at once."""
        for link_id, events in self._inbox.take(timeout_s):
            self.drafter.handle(link_id, events)
        self._send_out(self.drafter.flush())

    def _send_out(self, outbound: Sequence[Outbound]) -> None:
        for link_id, events in outbound:
            self._links[link_id][1].inbox.put(events)
