"""A draft link without a network: deterministic, with faults on demand."""

from collections.abc import Callable, Sequence

from outrider.core.link import DraftEvent, Goodbye, Hello, LinkDown, LinkEvent, LinkUp, TargetEvent
from outrider.draft.drafter import Drafter

__all__ = ["LoopbackTransport", "ManualClock"]


class ManualClock:
    """Time that moves only when somebody waits."""

    def __init__(self) -> None:
        self._now = 100.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class LoopbackTransport:
    """Implements `DraftTransport` around a `Drafter` in the same thread.

    The drafter works when the target receives, unless it is `paused`; then waiting costs the
    target its whole time-out. `tamper` may change, drop, repeat or invent events on their way.
    """

    def __init__(self, make_drafter: Callable[[], Drafter], hello: Hello, clock: ManualClock) -> None:
        self._make_drafter = make_drafter
        self._hello = hello
        self._clock = clock
        self._link_id = 0
        self._incoming: list[LinkEvent] = []
        self.drafter: Drafter | None = None
        self.paused = False
        self.full = False
        self.sent: list[TargetEvent] = []
        self.tamper: Callable[[Sequence[DraftEvent]], Sequence[DraftEvent]] = lambda events: events
        self.start_draft()

    def start_draft(self) -> None:
        """A new draft process with a new link."""
        self.drafter = self._make_drafter()
        self._link_id += 1
        ack = self.drafter.connect(self._link_id, self._hello)
        self._incoming.append(LinkUp(link_id=self._link_id, address="loopback:1", hello=ack))

    def kill_draft(self) -> None:
        """The draft process is gone, and all of its state."""
        self.drafter = None
        self._incoming.append(LinkDown(link_id=self._link_id, cause="draft killed by the test"))

    def send(self, events: Sequence[TargetEvent]) -> bool:
        if self.drafter is None or self.full:
            return False
        self.sent.extend(events)
        self.drafter.handle(self._link_id, list(events))
        return True

    def receive(self, timeout_s: float) -> list[LinkEvent]:
        if self.drafter is not None and not self.paused:
            while self.drafter.has_work:
                for _, events in self.drafter.step():
                    self._incoming.extend(self.tamper(events))
            for _, events in self.drafter.flush():
                self._incoming.extend(self.tamper(events))
        if not self._incoming:
            self._clock.advance(timeout_s)
        taken, self._incoming = self._incoming, []
        return taken

    def close(self) -> None:
        self.sent.append(Goodbye(reason="closed"))
