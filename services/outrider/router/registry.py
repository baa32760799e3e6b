"""The running requests of a router, by API key and request id."""

import asyncio
from collections.abc import Iterator

from outrider.core.errors import DuplicateRequest, OutriderError
from outrider.router.admission import Permit
from outrider.router.engine_link import EngineLink
from outrider.router.inbox import RequestInbox
from outrider.router.timing import Alarm
from outrider.telemetry.spans import RequestSpan

__all__ = ["RequestRegistry", "RunningRequest"]


class RunningRequest:
    """What a router holds for one request; `release` gives all of it back."""

    def __init__(
        self,
        *,
        key_id: str,
        request_id: str,
        traffic_class: str,
        arrived_s: float,
        permit: Permit,
        inbox: RequestInbox,
        span: RequestSpan,
    ) -> None:
        self.key_id = key_id
        self.request_id = request_id
        self.traffic_class = traffic_class
        self.arrived_s = arrived_s
        self.inbox = inbox
        self.aborted = False
        self.span = span
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.outcome = "abandoned"
        """What to count at the end: stays so when the client leaves."""
        self.permit = permit
        self._link: EngineLink | None = None
        self._stream_keys: tuple[int, ...] = ()
        self._backstop: Alarm | None = None

    @property
    def started(self) -> bool:
        """True once an engine has it."""
        return self._link is not None

    def attach(self, link: EngineLink, stream_keys: tuple[int, ...], backstop: Alarm) -> None:
        """The request runs on an engine now."""
        self._link, self._stream_keys, self._backstop = link, stream_keys, backstop

    def abort(self) -> None:
        """End it by wish of its client: the stream ends with what the engine says about that."""
        self.aborted = True
        if self._link is not None:
            self._link.abort(self._stream_keys)

    def fail(self, error: OutriderError) -> None:
        """End it with an error."""
        self.inbox.fail(error)

    def release(self) -> None:
        """Free the engine, the alarm and the place in admission, and end the span. Idempotent."""
        if self._link is not None:
            self._link.drop(self._stream_keys)
        if self._backstop is not None:
            self._backstop.cancel()
        self.permit.release(completed=self.started)
        self.span.end(outcome=self.outcome, prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)


class RequestRegistry:
    """Makes request ids idempotent, and finds requests to abort. Used on one event loop."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], RunningRequest] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(list(self._running.values()))

    def __len__(self) -> int:
        return len(self._running)

    def check_free(self, key_id: str, request_id: str) -> None:
        """Raise `DuplicateRequest` if the caller has a running request with this id."""
        if (key_id, request_id) in self._running:
            raise DuplicateRequest(request_id)

    def add(self, running: RunningRequest) -> None:
        """Register a request whose id is free."""
        self.check_free(running.key_id, running.request_id)
        self._running[running.key_id, running.request_id] = running
        self._empty.clear()

    def find(self, key_id: str, request_id: str) -> RunningRequest | None:
        """The caller's running request with this id."""
        return self._running.get((key_id, request_id))

    def remove(self, running: RunningRequest) -> None:
        """Forget a request."""
        del self._running[running.key_id, running.request_id]
        if not self._running:
            self._empty.set()

    async def wait_empty(self) -> None:
        """Wait until nothing runs."""
        await self._empty.wait()
