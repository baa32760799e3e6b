"""The drafting thread, and what the server on the event loop sees of it."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from outrider.core.errors import EngineUnavailable, ProtocolError
from outrider.core.link import DraftEvent, Drain, Hello, HelloAck, TargetEvent
from outrider.core.mailbox import AsyncMailbox, Mailbox
from outrider.core.ports import DraftSession
from outrider.draft.config import DraftConfig
from outrider.draft.drafter import Drafter, Outbound, nothing_new

__all__ = ["DraftLoop"]

logger = logging.getLogger(__name__)

Job = Callable[[], None]
"""Something to do on the drafting thread."""


class DraftLoop:
    """Runs a `Drafter` in a thread of its own; implements `core.ports.DraftService`.

    The event loop and the thread meet in bounded queues: one in, one out per session. The drafter
    belongs to the thread from `start` on.
    """

    def __init__(self, *, drafter: Drafter, config: DraftConfig) -> None:
        self._drafter = drafter
        self._config = config
        self._inbox: Mailbox[Job] = Mailbox(config.inbox_limit)
        self._orders: deque[Job] = deque()  # what must not be lost when the inbox is full
        self._link_ids = count(1)
        self._lock = threading.Lock()
        self._sessions: dict[int, _Session] = {}
        self._attached: set[int] = set()  # links that the drafter got; the thread's own
        self._ended = False
        self._failure: Exception | None = None
        self._measured = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outrider-draft", daemon=True)

    @property
    def failure(self) -> Exception | None:
        """What ended the thread, for health checks; None while it is well. There is no way back."""
        return self._failure

    def start(self) -> None:
        """Start the thread; returns when it has measured the step time.

        Raises `EngineUnavailable` when the model cannot run.
        """
        self._thread.start()
        self._measured.wait()
        if self._failure is not None:
            raise EngineUnavailable(f"the draft failed: {self._failure}") from self._failure

    def stop(self, timeout_s: float) -> bool:
        """End the thread and every session; False if it is still in a step after `timeout_s`.

        One that is still being started ends as soon as it runs.
        """
        self._inbox.close()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def drain(self, reason: str) -> None:
        """Tell every target that this draft is leaving; open sequences go on."""
        self._order(partial(self._drafter.drain, reason))

    def connect(self, hello: Hello) -> DraftSession:
        """Start a link; call it on the event loop that will receive.

        Raises `CompatibilityError` when the vocabularies differ, `EngineUnavailable` when the
        thread has ended.
        """
        ack = self._drafter.check(hello)
        outbox: AsyncMailbox[DraftEvent] = AsyncMailbox(self._config.outbox_limit)
        with self._lock:
            if self._ended:
                raise EngineUnavailable(str(self._failure or "the draft has stopped"))
            link_id = next(self._link_ids)
            session = _Session(ack, outbox, send=partial(self._send, link_id), close=partial(self._leave, link_id))
            self._sessions[link_id] = session
        self._order(partial(self._attach, link_id, hello))
        return session

    def _send(self, link_id: int, events: tuple[TargetEvent, ...]) -> bool:
        return self._inbox.put(partial(self._drafter.handle, link_id, events))

    def _leave(self, link_id: int) -> None:
        with self._lock:
            self._sessions.pop(link_id, None)
        self._order(partial(self._drafter.disconnect, link_id))

    def _order(self, job: Job) -> None:
        self._orders.append(job)
        self._inbox.put(nothing_new)  # wakes the thread; when the box is full it is awake

    def _attach(self, link_id: int, hello: Hello) -> None:
        self._drafter.connect(link_id, hello)
        self._attached.add(link_id)

    def _run(self) -> None:
        cause = "the draft has stopped"
        try:
            # Here, not where it is built: the thread that runs a model first has its compute threads, and
            # a second one that runs it leaves both waiting asleep (`engine.forward_threads`).
            self._drafter.warm_up()
            self._measured.set()
            while not self._inbox.closed:
                self._turn()
            for link_id in self._attached:
                self._drafter.disconnect(link_id)
        except Exception as error:
            logger.exception("the drafting thread failed")
            self._failure = error
            cause = f"the draft failed: {error}"
        finally:
            self._end(cause)
            self._measured.set()

    def _turn(self) -> None:
        self._take_in(0.0 if self._drafter.has_work else self._config.housekeeping_interval_s)
        if self._drafter.has_work:
            self._send_out(self._drafter.step(partial(self._take_in, 0.0)))
        else:
            self._drafter.tick()
            self._send_out(self._drafter.flush())
        self._close_left_links()

    def _take_in(self, timeout_s: float) -> None:
        """Apply everything that has arrived; answers that need no computing leave at once."""
        jobs = self._inbox.take(timeout_s)
        while self._orders:
            self._orders.popleft()()  # a link's start precedes its first message here
        for job in jobs:
            job()
        self._send_out(self._drafter.flush())

    def _send_out(self, outbound: Sequence[Outbound]) -> None:
        for link_id, events in outbound:
            with self._lock:
                session = self._sessions.get(link_id)
            if session is not None and not session.deliver(events):
                logger.warning("link %d: the target reads no more; disconnected", link_id)
                self._drafter.disconnect(link_id)

    def _close_left_links(self) -> None:
        """End the sessions of targets that said goodbye or were disconnected."""
        left = {link_id for link_id in self._attached if not self._drafter.has_link(link_id)}
        self._attached -= left
        for link_id in left:
            with self._lock:
                session = self._sessions.pop(link_id, None)
            if session is not None:
                session.end()

    def _end(self, cause: str) -> None:
        with self._lock:
            self._ended = True
            sessions = list(self._sessions.values())
            self._sessions.clear()
        self._inbox.close()
        for session in sessions:
            session.deliver((Drain(reason=cause),))
            session.end()


class _Session:
    """Implements `core.ports.DraftSession`."""

    def __init__(
        self,
        ack: HelloAck,
        outbox: AsyncMailbox[DraftEvent],
        *,
        send: Callable[[tuple[TargetEvent, ...]], bool],
        close: Callable[[], None],
    ) -> None:
        self._ack = ack
        self._outbox = outbox
        self._send = send
        self._close = close
        self._closed = False

    @property
    def ack(self) -> HelloAck:
        """The answer to Hello."""
        return self._ack

    def send(self, events: Sequence[TargetEvent]) -> None:
        """Hand over one message. After the end of the session it is dropped.

        Raises `ProtocolError` when too many messages wait.
        """
        if not self._closed and not self._send(tuple(events)) and not self._closed:
            raise ProtocolError("the draft is swamped: its inbox is full")

    async def receive(self) -> list[DraftEvent]:
        """Wait for events; empty when the session is closed."""
        return await self._outbox.take()

    def close(self) -> None:
        """Free everything of this link. Idempotent."""
        self.end()
        self._close()

    def deliver(self, events: Sequence[DraftEvent]) -> bool:
        """From the drafting thread: queue events for the target; False when it reads no more."""
        return self._outbox.put(events)

    def end(self) -> None:
        """From either side: what is queued can still be received, nothing more comes."""
        self._closed = True
        self._outbox.close()
