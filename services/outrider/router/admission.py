"""Admission: how much work a router takes on, from whom, and what a refused client is told."""

from collections.abc import Callable
from dataclasses import dataclass

from outrider.core.errors import Overloaded
from outrider.core.ports import Clock
from outrider.router.limits import AdmissionLimits, KeyLimits
from outrider.router.rates import Budget
from outrider.router.turnover import Turnover

__all__ = ["Admission", "LimitsOf", "Permit", "unlimited"]

_OPEN_SHARE = 0.75
"""Up to here everybody takes what is free; the rest is for keys that hold less than an equal share."""

LimitsOf = Callable[[str], KeyLimits]
"""The limits of a key, by its id. Asked for every request, so that they change live."""


def unlimited(key_id: str) -> KeyLimits:
    """No key has limits of its own."""
    return KeyLimits()


class Permit:
    """One admitted request. Released exactly once, whatever happens to the request."""

    def __init__(self, admission: "Admission", key_id: str, sequences: int) -> None:
        self._admission = admission
        self._key_id = key_id
        self._sequences = sequences
        self._tokens = 0
        self._released = False

    def charge(self, tokens: int, *, prompt_tokens: int = 0) -> None:
        """Add the request's possible tokens, known once it is tokenized. Raises `Overloaded`.

        `prompt_tokens` count against the key's rate.
        """
        self._admission.add_tokens(self._key_id, tokens)
        self._tokens += tokens
        self._admission.spend(self._key_id, prompt_tokens)

    def count_output(self, tokens: int) -> None:
        """Count committed tokens against the key's rate."""
        self._admission.spend(self._key_id, tokens)

    def release(self, *, completed: bool) -> None:
        """Give everything back. `completed`: it ran, so it counts for the completion rate. Idempotent."""
        if not self._released:
            self._released = True
            self._admission.remove(self._key_id, self._sequences, self._tokens, completed=completed)


@dataclass(slots=True, kw_only=True)
class _Use:
    """What one key holds now."""

    requests: int = 0
    sequences: int = 0
    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class _Rates:
    """What one key has left of its minute."""

    requests: Budget | None = None
    tokens: Budget | None = None


class Admission:
    """Counts requests and tokens in flight against `AdmissionLimits`. Used on one event loop."""

    def __init__(self, limits: AdmissionLimits, clock: Clock, limits_of: LimitsOf = unlimited) -> None:
        self._limits = limits
        self._clock = clock
        self._limits_of = limits_of
        self._uses: dict[str, _Use] = {}
        self._rates: dict[str, _Rates] = {}
        self._turnover = Turnover()
        """Of the router as a whole: everybody waits at the same limit."""
        self._turnovers: dict[str, Turnover] = {}
        """Of each key alone: at its own limits it waits for nobody else, and nobody for it."""
        self.requests = 0
        self.tokens = 0

    def update(self, limits: AdmissionLimits) -> None:
        """Apply new limits to what comes next; nothing in flight is taken back."""
        self._limits = limits

    def admit(self, key_id: str, sequences: int = 1) -> Permit:
        """Take on one request of a caller, of so many choices. Raises `Overloaded` with the time to wait."""
        limits, mine = self._limits, self._uses.get(key_id, _Use())
        if self.requests >= limits.max_requests:
            raise self._refusal(key_id, f"{self.requests} requests are in flight; the limit is {limits.max_requests}")
        if key_id and mine.requests >= limits.max_requests_per_key:
            raise self._own_refusal(
                key_id,
                f"{mine.requests} requests of this key are in flight; the limit is {limits.max_requests_per_key}",
            )
        if self._takes_too_much(key_id, self.requests + 1, mine.requests + 1, limits.max_requests):
            raise self._own_refusal(
                key_id, f"{mine.requests} requests of this key are in flight; what is left is for keys that hold less"
            )
        rates = self._check_key(key_id, mine, sequences)
        if rates.requests is not None:
            rates.requests.spend(1, self._clock.now())
        if not self.requests:
            self._turnover.resumed(self._clock.now())
        if not mine.requests:
            self._own_turnover(key_id).resumed(self._clock.now())
        self.requests += 1
        use = self._uses.setdefault(key_id, mine)
        use.requests += 1
        use.sequences += sequences
        return Permit(self, key_id, sequences)

    def add_tokens(self, key_id: str, tokens: int) -> None:
        """Take on tokens of an admitted request. A request larger than the limit runs when it is alone."""
        total, limit, use = self.tokens + tokens, self._limits.max_tokens, self._uses[key_id]
        if self.tokens and total > limit:
            raise self._refusal(
                key_id, f"{self.tokens} tokens are in flight and {tokens} more exceed the limit {limit}"
            )
        if use.tokens and self._takes_too_much(key_id, total, use.tokens + tokens, limit):
            raise self._own_refusal(
                key_id, f"{use.tokens} tokens of this key are in flight; what is left is for keys with fewer"
            )
        self.tokens += tokens
        use.tokens += tokens

    def spend(self, key_id: str, tokens: int) -> None:
        """Charge tokens to the rate of a key."""
        if (rates := self._rates.get(key_id)) is not None and rates.tokens is not None:
            rates.tokens.spend(tokens, self._clock.now())

    def remove(self, key_id: str, sequences: int, tokens: int, *, completed: bool) -> None:
        """Give back what a permit held."""
        self.requests -= 1
        self.tokens -= tokens
        use = self._uses[key_id]
        use.requests -= 1
        use.sequences -= sequences
        use.tokens -= tokens
        if not use.requests:
            del self._uses[key_id]
        if completed:
            now_s = self._clock.now()
            self._turnover.completed(now_s)
            self._own_turnover(key_id).completed(now_s)

    def _takes_too_much(self, key_id: str, total: int, mine: int, limit: int) -> bool:
        """Whether a key would take more than an equal share out of the part that is kept for others.

        A key alone may take everything; beside others it leaves room for those that come later.
        """
        num_keys = len(self._uses.keys() | {key_id})
        return total > _OPEN_SHARE * limit and mine > max(limit // num_keys, 1)

    def _check_key(self, key_id: str, mine: _Use, sequences: int) -> _Rates:
        """Hold a request against its key's own limits. Raises `Overloaded`; returns the key's rates."""
        limits, now_s = self._limits_of(key_id), self._clock.now()
        most = limits.max_concurrent_sequences
        if most is not None and mine.sequences + sequences > most:
            raise self._own_refusal(
                key_id,
                f"{mine.sequences} sequences of this key are in flight and {sequences} more exceed its limit {most}",
            )
        rates = self._rates.setdefault(key_id, _Rates())
        rates.requests = _resized(rates.requests, limits.requests_per_minute, now_s)
        rates.tokens = _resized(rates.tokens, limits.tokens_per_minute, now_s)
        for budget, per_minute, unit in (
            (rates.requests, limits.requests_per_minute, "requests"),
            (rates.tokens, limits.tokens_per_minute, "tokens"),
        ):
            if budget is not None and (wait_s := budget.wait_s(1, now_s)) > 0:
                raise Overloaded(f"this key has used its {per_minute} {unit} per minute", retry_after_s=wait_s)
        return rates

    def _refusal(self, key_id: str, problem: str) -> Overloaded:
        """At a limit of the whole router."""
        return self._overloaded(problem, self._turnover.refused(key_id, self._clock.now()))

    def _own_refusal(self, key_id: str, problem: str) -> Overloaded:
        """At a limit of this key, where the place that it waits for is one of its own."""
        return self._overloaded(problem, self._own_turnover(key_id).refused(key_id, self._clock.now()))

    def _overloaded(self, problem: str, wait_s: float) -> Overloaded:
        low, high = self._limits.min_retry_after_s, self._limits.max_retry_after_s
        return Overloaded(problem, retry_after_s=min(max(wait_s, low), high))

    def _own_turnover(self, key_id: str) -> Turnover:
        return self._turnovers.setdefault(key_id, Turnover())


def _resized(budget: Budget | None, per_minute: int | None, now_s: float) -> Budget | None:
    if per_minute is None:
        return None
    if budget is None:
        return Budget(per_minute, now_s)
    budget.resize(per_minute, now_s)
    return budget
