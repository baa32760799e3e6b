"""What a transport has for the engine thread: events in order, and which link to send on.

The engine sends on a link only once it has *taken* that link's LinkUp, and no more once it has
taken its LinkDown: so nothing that it meant for one link can reach another.
"""

from dataclasses import dataclass

from outrider.core.link import DraftEvent, LinkDown, LinkEvent, LinkUp, TargetEvent
from outrider.core.mailbox import AsyncMailbox, Mailbox

__all__ = ["MIN_INBOX", "LinkInbox", "Outbox"]

MIN_INBOX = 4
"""Room for the changes of state that are kept when the box is full."""

Outbox = AsyncMailbox[tuple[TargetEvent, ...]]
"""Messages that wait to be sent on one link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Up:
    event: LinkUp
    outbox: Outbox


_Item = _Up | LinkDown | list[DraftEvent]


class LinkInbox:
    """Filled on the event loop (`up`, `down`, `events`), emptied on the engine thread (`take`)."""

    def __init__(self, limit: int) -> None:
        self._box: Mailbox[_Item] = Mailbox(limit)
        self.outbox: Outbox | None = None
        """Of the link that the engine knows to be up. Engine thread only."""

    def up(self, event: LinkUp, outbox: Outbox) -> None:
        """A link is established."""
        self._put_state(_Up(event=event, outbox=outbox))

    def down(self, event: LinkDown) -> None:
        """A link is lost or was not to be had."""
        self._put_state(event)

    def events(self, events: list[DraftEvent]) -> bool:
        """The events of one message; False, and dropped, when the engine does not take them."""
        return self._box.put(events)

    def take(self, timeout_s: float) -> list[LinkEvent]:
        """Everything that has arrived, waiting at most `timeout_s` for the first."""
        taken: list[LinkEvent] = []
        for item in self._box.take(timeout_s):
            if isinstance(item, list):
                taken.extend(item)
            elif isinstance(item, LinkDown):
                self.outbox = None
                taken.append(item)
            else:
                self.outbox = item.outbox
                taken.append(item.event)
        return taken

    def close(self) -> None:
        """Take nothing in any more and wake the engine thread."""
        self._box.close()

    def _put_state(self, item: _Up | LinkDown) -> None:
        """Add a change of state, which must not get lost: a full box gives up stale events for it."""
        if self._box.put(item) or self._box.closed:
            return
        states = [one for one in self._box.take(0.0) if not isinstance(one, list)]
        downs = [at for at, one in enumerate(states) if isinstance(one, LinkDown)]
        if downs:
            # The first ends the link that the engine knows; what came and went since, it need not know.
            states = [*states[downs[0] : downs[0] + 1], *states[downs[-1] + 1 :]]
        for one in [*states, item]:
            self._box.put(one)
