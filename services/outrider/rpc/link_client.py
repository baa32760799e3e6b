"""The target's end of its link to a draft: an engine thread in front, a supervised stream behind."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random, SystemRandom

from outrider.core.errors import ConfigError
from outrider.core.link import Hello, LinkDown, LinkEvent, LinkUp, TargetEvent
from outrider.core.mailbox import AsyncMailbox
from outrider.core.ports import Clock
from outrider.rpc.backoff import Backoff, BackoffOptions
from outrider.rpc.counters import LinkCounters
from outrider.rpc.link_inbox import MIN_INBOX, LinkInbox, Outbox
from outrider.rpc.link_stream import LinkLost, LinkStream, StreamOptions

__all__ = ["GrpcDraftTransport", "LinkOptions"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """Limits of a transport."""

    stream: StreamOptions = field(default_factory=StreamOptions)
    backoff: BackoffOptions = field(default_factory=BackoffOptions)
    queue_messages: int = 64
    """Messages that may wait to be sent; one more, and `send` says False."""
    inbox_messages: int = 4096
    """Messages that may wait for the engine; further ones are dropped and counted."""

    def __post_init__(self) -> None:
        if self.queue_messages < 1:
            raise ConfigError(f"queue_messages: {self.queue_messages} is below 1")
        if self.inbox_messages < MIN_INBOX:
            raise ConfigError(f"inbox_messages: {self.inbox_messages} is below {MIN_INBOX}")


class GrpcDraftTransport:
    """A `DraftTransport` that keeps one link to one of several drafts and makes it anew when it breaks.

    `send`, `receive` and `close` are for the engine thread; `start` and `stop` belong to the event
    loop; `set_addresses` may be called from anywhere. `hello` is the greeting of every link, with a
    new random link id each time. A LinkDown comes for every link that was up, and for attempts that
    fail whenever the cause changes.
    """

    def __init__(
        self, hello: Hello, *, clock: Clock, options: LinkOptions | None = None, random: Random | None = None
    ) -> None:
        self._hello = hello
        self._clock = clock
        self._options = options or LinkOptions()
        self._random = random or SystemRandom()
        self._backoff = Backoff(self._options.backoff, self._random)
        self._inbox = LinkInbox(self._options.inbox_messages)
        self._addresses: tuple[str, ...] = ()
        self._next = 0
        self._closing = False
        self._reported = ""
        self._current: tuple[str, LinkStream, Outbox] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.counters = LinkCounters()

    @property
    def messages_sent(self) -> int:
        """Messages written to all links so far."""
        return self.counters.messages_sent

    @property
    def messages_received(self) -> int:
        """Messages read from all links so far."""
        return self.counters.messages_received

    @property
    def dropped(self) -> int:
        """Received messages or events that were dropped so far."""
        return self.counters.dropped

    @property
    def linked(self) -> str:
        """Address of the draft whose link is up and wanted; empty: none. For the event loop."""
        return self._current[0] if self._current is not None else ""

    def start(self) -> None:
        """Begin to connect, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._supervise(), name="draft-link")

    async def stop(self) -> None:
        """Say goodbye, and return once the link is closed."""
        self._leave_for_good()
        if self._task is not None:
            await self._task

    def set_address(self, address: str | None) -> None:
        """The one draft to talk to; None: none."""
        self.set_addresses([] if address is None else [address])

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """The drafts to choose from, in order of preference. A link to another one is given up; one to any of
        these stays.
        """
        self._on_loop(self._apply_addresses, tuple(addresses))

    def send(self, events: Sequence[TargetEvent]) -> bool:
        """Queue events as one message; never blocks. False: not connected, or the queue is full."""
        outbox = self._inbox.outbox
        return outbox is not None and (not events or outbox.put([tuple(events)]))

    def receive(self, timeout_s: float) -> list[LinkEvent]:
        """Return everything that has arrived, in order, waiting at most `timeout_s` for the first."""
        return self._inbox.take(timeout_s)

    def close(self) -> None:
        """Say goodbye and stop. Does not wait for it."""
        self._inbox.close()
        self._on_loop(self._leave_for_good)

    def _on_loop(self, callback: Callable[..., None], *args: object) -> None:
        if self._loop is None:
            callback(*args)
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the link with it
            self._loop.call_soon_threadsafe(callback, *args)

    def _apply_addresses(self, addresses: tuple[str, ...]) -> None:
        if addresses == self._addresses:
            return
        others = set(addresses) != set(self._addresses)
        self._addresses = addresses
        if self.linked in addresses:  # after a loss the others come first, and not without a pause
            self._next = addresses.index(self.linked) + 1
        elif others:  # the same ones in another order end no wait
            self._next = 0
            self._changed.set()
        if self._current is not None and self.linked not in addresses:
            _, stream, outbox = self._current
            self._current = None
            stream.leave(outbox, "another draft is preferred" if addresses else "no draft is wanted")

    def _leave_for_good(self) -> None:
        self._closing = True
        self._inbox.close()
        self._changed.set()
        if self._current is not None:
            _, stream, outbox = self._current
            stream.leave(outbox, "the engine stops")

    async def _supervise(self) -> None:
        while not self._closing:
            self._changed.clear()
            if not self._addresses:
                await self._changed.wait()
                continue
            address = self._addresses[self._next % len(self._addresses)]
            self._next += 1
            delay_s = await self._link(address)
            # New addresses end the wait: the reason for it may be gone.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), delay_s)

    async def _link(self, address: str) -> float:
        """One link, from its first attempt to its end; returns the seconds to wait before the next."""
        link_id = self._random.getrandbits(64) or 1
        try:
            stream = await LinkStream.connect(
                address, replace(self._hello, link_id=link_id), self._options.stream, self.counters
            )
        except LinkLost as loss:
            self._report_failure(link_id, address, loss.cause)
            return self._backoff.after_refusal() if loss.refused else self._backoff.after_loss(0.0)
        up_since = self._clock.now()
        outbox: Outbox = AsyncMailbox(self._options.queue_messages)
        self._current = (address, stream, outbox)
        self._reported = ""
        self._inbox.up(LinkUp(link_id=link_id, address=address, hello=stream.ack), outbox)
        _logger.info("link %x to draft %s is up", link_id, address)
        if self._closing or address not in self._addresses:  # changed while the greeting was under way
            self._current = None
            stream.leave(outbox, "no longer wanted")
        try:
            end = await stream.run(outbox, self._inbox.events)
        finally:
            self._current = None
        _logger.info("link %x to draft %s is down: %s", link_id, address, end.cause)
        self._inbox.down(LinkDown(link_id=link_id, cause=end.cause))
        return self._backoff.after_loss(self._clock.now() - up_since)

    def _report_failure(self, link_id: int, address: str, cause: str) -> None:
        """Tell the engine why there is no link, once per cause."""
        if cause != self._reported:
            self._reported = cause
            _logger.warning("no link to draft %s: %s", address, cause)
            self._inbox.down(LinkDown(link_id=link_id, cause=cause))
