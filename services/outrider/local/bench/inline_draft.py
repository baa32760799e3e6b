"""A draft on the engine's own thread: it works exactly while the target waits for it, and never else."""

from collections.abc import Sequence

from outrider.core.link import Hello, LinkEvent, LinkUp, TargetEvent
from outrider.draft.drafter import Drafter

__all__ = ["InlineDraft"]


class InlineDraft:
    """Implements `DraftTransport` around a `Drafter`. All of its CPU time falls into the wait phase."""

    def __init__(self, drafter: Drafter, hello: Hello) -> None:
        self._drafter = drafter
        self._link_id = 1
        self._incoming: list[LinkEvent] = [
            LinkUp(link_id=self._link_id, address="inline:0", hello=drafter.connect(self._link_id, hello))
        ]
        self.messages = 0
        """Messages that the target has sent."""

    def send(self, events: Sequence[TargetEvent]) -> bool:
        """Hand events over; nothing is computed yet."""
        self.messages += 1
        self._drafter.handle(self._link_id, events)
        return True

    def receive(self, timeout_s: float) -> list[LinkEvent]:
        """What is there; with a time-out above 0 the draft works first."""
        while timeout_s > 0.0 and self._drafter.has_work:
            for _, events in self._drafter.step():
                self._incoming.extend(events)
        for _, events in self._drafter.flush():
            self._incoming.extend(events)
        taken, self._incoming = self._incoming, []
        return taken

    def close(self) -> None:
        """Free everything of the link."""
        self._drafter.disconnect(self._link_id)
