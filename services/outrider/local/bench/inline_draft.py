"""A draft on the engine's own thread that answers at once, and whose time does not count."""

from collections.abc import Sequence

from outrider.core.link import Hello, LinkEvent, LinkUp, TargetEvent
from outrider.draft.drafter import Drafter
from outrider.local.bench.cpu_clock import ThreadCpuClock

__all__ = ["InlineDraft"]


class InlineDraft:
    """Implements `DraftTransport` around a `Drafter`. While it works, the engine's clock stands still."""

    def __init__(self, drafter: Drafter, hello: Hello, clock: ThreadCpuClock) -> None:
        self._drafter = drafter
        self._clock = clock
        self._link_id = 1
        self._incoming: list[LinkEvent] = [
            LinkUp(link_id=self._link_id, address="inline:0", hello=drafter.connect(self._link_id, hello))
        ]

    def send(self, events: Sequence[TargetEvent]) -> bool:
        """Hand events over, and let the draft work until it has nothing left to do."""
        with self._clock.stopped():
            self._drafter.handle(self._link_id, events)
            while self._drafter.has_work:
                for _, answers in self._drafter.step():
                    self._incoming.extend(answers)
            for _, answers in self._drafter.flush():
                self._incoming.extend(answers)
        return True

    def receive(self, timeout_s: float) -> list[LinkEvent]:
        """What is there; nothing would come by waiting."""
        taken, self._incoming = self._incoming, []
        return taken

    def close(self) -> None:
        """Free everything of the link."""
        self._drafter.disconnect(self._link_id)
