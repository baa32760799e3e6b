"""What a block of the draft costs, measured on its link."""

from outrider.target.proposers import DraftTimes

__all__ = ["LinkTimes"]

_SMOOTHING = 0.1
_MOST = 2.0  # times the mean, and a little: more is something else than the network
_FLOOR_S = 0.0005
_FORGETTING = 0.95


class LinkTimes:
    """A draft step, as the draft says, and a hop: half of what is left of a round trip beside the drafting."""

    def __init__(self) -> None:
        self._step_s = self._hop_s = 0.0

    def start(self, step_ms: float) -> None:
        """A new link, to a draft that greets with this step time."""
        self._step_s, self._hop_s = step_ms / 1e3, 0.0

    def step_took(self, step_ms: float) -> None:
        """The draft reports its recent step time."""
        self._step_s = step_ms / 1e3

    def answered(self, round_trip_s: float, num_tokens: int) -> float:
        """A block of so many tokens took this long, from verdicts to its arrival. Returns the hop."""
        hop_s = max(0.0, round_trip_s - num_tokens * self._step_s) / 2
        # One answer that something has held up must not make waiting, and drafting ahead, seem too dear.
        counted_s = min(hop_s, _MOST * self._hop_s + _FLOOR_S)
        self._hop_s += _SMOOTHING * (counted_s - self._hop_s) if self._hop_s else hop_s
        return hop_s

    def not_asked(self) -> None:
        """Waiting seemed too dear. One slow answer must not make it so for ever."""
        self._hop_s *= _FORGETTING

    @property
    def times(self) -> DraftTimes:
        """As far as they were measured."""
        return DraftTimes(step_s=self._step_s, hop_s=self._hop_s)
