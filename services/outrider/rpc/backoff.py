"""How long to wait before the next attempt: exponential with jitter, long after a refusal."""

from dataclasses import dataclass
from random import Random

from outrider.core.errors import ConfigError

__all__ = ["Backoff", "BackoffOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffOptions:
    """Seconds between attempts."""

    initial_s: float = 0.1
    """Before the first new attempt."""
    multiplier: float = 2.0
    """Growth per failure."""
    max_s: float = 5.0
    """Longest wait after a loss."""
    refused_s: float = 30.0
    """Wait after a refusal, which another attempt will not change soon."""
    jitter: float = 0.3
    """Share of the wait that is random, so that many clients of one dead peer do not return at once."""
    stable_s: float = 5.0
    """A connection that lasted this long clears the count of failures."""

    def __post_init__(self) -> None:
        for name in ("initial_s", "max_s", "refused_s", "stable_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"backoff.{name}: {getattr(self, name)} is not above 0")
        if self.multiplier < 1:
            raise ConfigError(f"backoff.multiplier: {self.multiplier} is below 1")
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"backoff.jitter: {self.jitter} is outside [0, 1]")


class Backoff:
    """Counts failures in a row and says how long to wait after each."""

    def __init__(self, options: BackoffOptions, random: Random) -> None:
        self._options = options
        self._random = random
        self.failures = 0

    def after_loss(self, lasted_s: float) -> float:
        """Seconds to wait after a connection that lasted `lasted_s` (0: it never came up)."""
        options = self._options
        if lasted_s >= options.stable_s:
            self.failures = 0
        delay = min(options.initial_s * options.multiplier ** min(self.failures, 64), options.max_s)
        self.failures += 1
        return self._jittered(delay)

    def after_refusal(self) -> float:
        """Seconds to wait after the peer said no."""
        self.failures += 1
        return self._jittered(self._options.refused_s)

    def _jittered(self, delay: float) -> float:
        return delay * (1 - self._options.jitter * self._random.random())
