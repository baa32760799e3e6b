"""The running requests of a router, by API key and request id."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence

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
        self.started = False
        """True once an engine has had it."""
        self._places: dict[int, tuple[EngineLink, int]] = {}
        self._alarms: list[Alarm] = []

    def place(self, choice_indices: Sequence[int], link: EngineLink, stream_keys: Sequence[int]) -> None:
        """These choices run on an engine now, under these keys."""
        self.started = True
        for index, key in zip(choice_indices, stream_keys, strict=True):
            self._places[index] = (link, key)

    def hold(self, alarm: Alarm) -> None:
        """Cancel this with the end of the request."""
        self._alarms.append(alarm)

    def abort(self) -> None:
        """End it by wish of its client: the stream ends with what the engine says about that."""
        self.aborted = True
        for link, keys in self._keys_by_link():
            link.abort(keys)
        self.inbox.wake()

    def fail(self, error: OutriderError) -> None:
        """End it with an error."""
        self.inbox.fail(error)

    def release(self) -> None:
        """Free the engines, the alarms and the place in admission, and end the span. Idempotent."""
        for link, keys in self._keys_by_link():
            link.drop(keys)
        for alarm in self._alarms:
            alarm.cancel()
        self.permit.release(completed=self.started)
        self.span.end(outcome=self.outcome, prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)

    def _keys_by_link(self) -> list[tuple[EngineLink, list[int]]]:
        keys: dict[EngineLink, list[int]] = defaultdict(list)
        for link, key in self._places.values():
            keys[link].append(key)
        return list(keys.items())


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
