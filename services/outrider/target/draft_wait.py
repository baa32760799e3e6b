"""How long a round may wait for its draft. One late answer ends the waiting until the draft speaks."""

import math

__all__ = ["DraftWait"]

_SMOOTHING = 0.2
_MARGIN = 3.0  # a round trip may take this many times its mean before it counts as late
_FLOOR_S = 0.002  # a mean near zero must not make one slow hop look like a loss
_MAX_REST_ROUNDS = 64
_MAX_UNHEARD_LAUNCHES = 16
_PING_INTERVAL_S = 1.0


class DraftWait:
    """The wait budget of sequential mode, and a breaker for drafts that are late again and again.

    The budget of a round runs from the moment its verdicts were sent: `_MARGIN` times the mean
    round trip, at most `limit_s`. After the n-th late round in a row, 2^n rounds are not asked for.
    """

    def __init__(self, *, limit_s: float) -> None:
        self.limit_s = limit_s
        """No wait is longer."""
        self._mean_s: float | None = None
        self._started_at: float | None = None
        self._answered = False
        self._late_in_a_row = 0
        self._rest_rounds = 0
        self._unheard_launches = 0
        self._pinged_at = -math.inf
        self.last_s = 0.0
        """Latest time from verdicts to blocks."""
        self.suspect = False
        """The draft owes an answer and is silent: nothing is sent to it and nothing waited for."""

    @property
    def round_trip_s(self) -> float:
        """Mean time from verdicts to blocks; 0 before the first."""
        return self._mean_s or 0.0

    @property
    def resting(self) -> bool:
        """True while the breaker holds rounds back."""
        return self._rest_rounds > 0

    def start_round(self, now: float) -> None:
        """Verdicts are on their way."""
        self._started_at = now
        self._answered = False

    def let_be(self) -> None:
        """Nobody waits in this round, so when its blocks are seen says nothing about the round trip."""
        if not self._answered:
            self._started_at = None

    def end_round(self) -> None:
        """A step is over; one more round of rest has passed."""
        self._rest_rounds = max(0, self._rest_rounds - 1)

    def left(self, now: float) -> float:
        """Seconds that the current round may still wait; 0 or less means go on."""
        if self.suspect or self._started_at is None:
            return 0.0
        expected = self.limit_s if self._mean_s is None else max(_FLOOR_S, _MARGIN * self._mean_s)
        budget = min(self.limit_s, expected)
        return self._started_at + budget - now

    def launched(self) -> None:
        """The draft was told of a step. Nothing is waited for, so only silence over many tells of its loss."""
        self._unheard_launches += 1
        if self._unheard_launches > _MAX_UNHEARD_LAUNCHES:
            self.suspect = True

    def ping_due(self, now: float) -> bool:
        """Whether a draft that has long said nothing should be asked if it lives; at most once a second."""
        if not (self.suspect or self._unheard_launches > _MAX_UNHEARD_LAUNCHES // 2):
            return False
        if now - self._pinged_at < _PING_INTERVAL_S:
            return False
        self._pinged_at = now
        return True

    def answered(self, now: float) -> bool:
        """A block of the round has arrived; True for the first, whose round trip `last_s` then holds."""
        if self._started_at is None or self._answered:
            return False
        took = self.last_s = now - self._started_at
        self._mean_s = took if self._mean_s is None else self._mean_s + _SMOOTHING * (took - self._mean_s)
        self._late_in_a_row = 0
        self._answered = True
        return True

    def heard(self, now: float) -> None:
        """The draft has said something: it lives."""
        self._unheard_launches = 0
        if self.suspect:
            self.suspect = False
            # What it says late still tells how long it takes.
            if self._started_at is not None and self._mean_s is not None and not self._answered:
                self._mean_s += _SMOOTHING * (now - self._started_at - self._mean_s)
            self._started_at = None

    def missed(self) -> None:
        """The budget ran out with blocks missing."""
        self.suspect = True
        self._rest_rounds = min(2**self._late_in_a_row, _MAX_REST_ROUNDS)
        self._late_in_a_row += 1

    def reset(self) -> None:
        """The link is new or gone."""
        self.suspect = False
        self._started_at = None
        self._late_in_a_row = 0
        self._rest_rounds = 0
        self._unheard_launches = 0
        self._mean_s = None
