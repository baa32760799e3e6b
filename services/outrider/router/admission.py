"""Admission: how much work a router takes on, and what a refused client is told."""

from collections import deque

from outrider.core.errors import Overloaded
from outrider.core.ports import Clock
from outrider.router.limits import AdmissionLimits

__all__ = ["Admission", "Permit"]

_WINDOW = 64
"""Recent completions that the rate is taken from."""


class Permit:
    """One admitted request. Released exactly once, whatever happens to the request."""

    def __init__(self, admission: "Admission", key_id: str) -> None:
        self._admission = admission
        self._key_id = key_id
        self._tokens = 0
        self._released = False

    def charge(self, tokens: int) -> None:
        """Add the request's possible tokens, known once it is tokenized. Raises `Overloaded`."""
        self._admission.add_tokens(tokens)
        self._tokens += tokens

    def release(self, *, completed: bool) -> None:
        """Give everything back. `completed`: it ran, so it counts for the completion rate. Idempotent."""
        if not self._released:
            self._released = True
            self._admission.remove(self._key_id, self._tokens, completed=completed)


class Admission:
    """Counts requests and tokens in flight against `AdmissionLimits`. Used on one event loop."""

    def __init__(self, limits: AdmissionLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._per_key: dict[str, int] = {}
        self._completions: deque[float] = deque(maxlen=_WINDOW)
        self._refused = 0
        """Requests refused since the last completion: they will all be back."""
        self.requests = 0
        self.tokens = 0

    def update(self, limits: AdmissionLimits) -> None:
        """Apply new limits to what comes next; nothing in flight is taken back."""
        self._limits = limits

    def admit(self, key_id: str) -> Permit:
        """Take on one request of a caller. Raises `Overloaded` with the time to wait."""
        limits = self._limits
        if self.requests >= limits.max_requests:
            raise self._refusal(f"{self.requests} requests are in flight; the limit is {limits.max_requests}")
        mine = self._per_key.get(key_id, 0)
        if key_id and mine >= limits.max_requests_per_key:
            raise self._refusal(
                f"{mine} requests of this key are in flight; the limit is {limits.max_requests_per_key}"
            )
        self.requests += 1
        self._per_key[key_id] = mine + 1
        return Permit(self, key_id)

    def add_tokens(self, tokens: int) -> None:
        """Take on tokens of an admitted request. A request larger than the limit runs when it is alone."""
        if self.tokens and self.tokens + tokens > self._limits.max_tokens:
            raise self._refusal(
                f"{self.tokens} tokens are in flight and {tokens} more exceed the limit {self._limits.max_tokens}"
            )
        self.tokens += tokens

    def remove(self, key_id: str, tokens: int, *, completed: bool) -> None:
        """Give back what a permit held."""
        self.requests -= 1
        self.tokens -= tokens
        self._per_key[key_id] -= 1
        if not self._per_key[key_id]:
            del self._per_key[key_id]
        if completed:
            self._completions.append(self._clock.now())
            self._refused = 0

    def _refusal(self, problem: str) -> Overloaded:
        self._refused += 1
        return Overloaded(problem, retry_after_s=self._retry_after_s())

    def _retry_after_s(self) -> float:
        """Until everybody refused so far has found a place, at the recent completion rate."""
        low, high = self._limits.min_retry_after_s, self._limits.max_retry_after_s
        if not self._completions:
            return high
        per_completion_s = (self._clock.now() - self._completions[0]) / len(self._completions)
        return min(max(self._refused * per_completion_s, low), high)
