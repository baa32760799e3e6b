"""Which request an engine event belongs to: stream keys of one link, and the inboxes behind them."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.dispatch import SequenceDelta, SequenceEnd, SequenceErrorCode, SequenceFailure
from outrider.core.errors import RequestAborted
from outrider.router.inbox import RequestInbox

__all__ = ["SequenceRoutes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    inbox: RequestInbox
    choice_index: int


class SequenceRoutes:
    """Routes events to inboxes. Keys are never reused, not even after a reconnect."""

    def __init__(self) -> None:
        self._routes: dict[int, _Route] = {}
        self._next_key = 1

    def __len__(self) -> int:
        return len(self._routes)

    def __contains__(self, key: int) -> bool:
        return key in self._routes

    def reserve(self, count: int) -> tuple[int, ...]:
        """Fresh stream keys, not routed yet."""
        keys = tuple(range(self._next_key, self._next_key + count))
        self._next_key += count
        return keys

    def add(self, keys: Sequence[int], choice_indices: Sequence[int], inbox: RequestInbox) -> None:
        """Route choices of a request; one key for each index."""
        for key, choice_index in zip(keys, choice_indices, strict=True):
            self._routes[key] = _Route(inbox=inbox, choice_index=choice_index)

    def deliver(self, event: SequenceDelta | SequenceEnd) -> tuple[int, ...]:
        """Put an event into its inbox.

        Returns the keys to end because their inbox takes nothing any more: its client reads too
        slowly, which fails this request alone, or it has failed before. They stay routed.
        """
        route = self._routes.get(event.stream_key)
        if route is None:
            return ()  # dropped while the event was on its way
        if isinstance(event, SequenceEnd):
            del self._routes[event.stream_key]
        if route.inbox.put((route.choice_index, event)):
            return ()
        route.inbox.fail(RequestAborted("the client reads too slowly: too many messages were waiting for it"))
        return tuple(key for key, other in self._routes.items() if other.inbox is route.inbox)

    def forget(self, keys: Sequence[int]) -> None:
        """Drop what arrives for these keys from now on."""
        for key in keys:
            self._routes.pop(key, None)

    def lose_all(self, cause: str) -> int:
        """End every sequence as an engine would that still could; returns how many were routed."""
        routes, self._routes = self._routes, {}
        failure = SequenceFailure(code=SequenceErrorCode.UNAVAILABLE, message=cause)
        for key, route in routes.items():
            route.inbox.put((route.choice_index, SequenceEnd(stream_key=key, failure=failure)))
        return len(routes)
