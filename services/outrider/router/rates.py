"""What one API key may spend per minute."""

from outrider.core.errors import ConfigError

__all__ = ["Budget"]

_MINUTE_S = 60.0


class Budget:
    """A bucket that refills evenly and holds one minute's worth. May be overdrawn: then it has to fill up first.

    So a cost that shows only afterwards (the tokens of an output) is charged when it shows, exactly,
    and nothing has to be estimated. Worked example: 60 per minute, all 60 spent at once, and at once 30
    more by what was running already: back at 0 after 30 s, and 1 is there after 31 s.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        """A full bucket. Raises `ConfigError` unless `per_minute` is at least 1."""
        if per_minute < 1:
            raise ConfigError(f"per_minute: {per_minute} is below 1")
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def resize(self, per_minute: int, now_s: float) -> None:
        """Another rate from now on. What is there stays, as far as the new size holds it."""
        self._refill(now_s)
        self._per_minute = per_minute
        self._level = min(self._level, float(per_minute))

    def wait_s(self, amount: int, now_s: float) -> float:
        """Seconds until `amount` (at most the size of the bucket) is there; 0 when it is."""
        self._refill(now_s)
        missing = min(amount, self._per_minute) - self._level
        return max(missing, 0.0) * _MINUTE_S / self._per_minute

    def spend(self, amount: int, now_s: float) -> None:
        """Take `amount` out, whether it is there or not."""
        self._refill(now_s)
        self._level -= amount

    def _refill(self, now_s: float) -> None:
        gained = (now_s - self._at_s) * self._per_minute / _MINUTE_S
        self._level = min(self._level + gained, float(self._per_minute))
        self._at_s = now_s
