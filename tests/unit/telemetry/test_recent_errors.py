"""The last errors, with their ages."""

from outrider.core.fleet import PastError
from outrider.telemetry.recent_errors import RecentErrors


class Time:
    at_s = 100.0

    def now(self) -> float:
        return self.at_s


def test_the_latest_come_first_and_the_oldest_are_forgotten() -> None:
    time = Time()
    errors = RecentErrors(time, limit=2)
    for text in ("one", "two", "three"):
        errors.add(text)
        time.at_s += 1.0
    assert errors.latest_first() == (PastError(text="three", age_s=1.0), PastError(text="two", age_s=2.0))
