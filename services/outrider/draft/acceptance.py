"""How likely the draft's guesses are right, learned from verdicts.

The margin of a guess (perturbed log-weight of the first candidate minus the second) says how sure
the draft is. Guesses are counted by margin; what the first guess misses is shared over the ranks
behind it. Both start from a prior and follow what is seen.
"""

from bisect import bisect_right

__all__ = ["AcceptanceModel"]

_EDGES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Margins in nats; the last bucket is open."""
_PRIOR_RATES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_PRIOR_WEIGHT = 8.0
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_SHARES = (0.44, 0.19, 0.11, 0.06, 0.05, 0.03)
"""Share of the rest that the second, third … guess holds; measured on real logits at T = 1 with
shared noise (4,731 positions)."""
_FORGETTING = 0.998  # per observation of a bucket: about the last 500 count


class AcceptanceModel:
    """Probability that the target's token is the draft's i-th guess at a position."""

    def __init__(self) -> None:
        self._hits = [rate * _PRIOR_WEIGHT for rate in _PRIOR_RATES]
        self._trials = [_PRIOR_WEIGHT] * len(_PRIOR_RATES)
        self._rank_hits = [share * _PRIOR_WEIGHT for share in _PRIOR_SHARES]
        self._misses = _PRIOR_WEIGHT
        self._accepted = _PRIOR_ACCEPTANCE * _PRIOR_WEIGHT
        self._judged = _PRIOR_WEIGHT

    @property
    def acceptance(self) -> float:
        """Of a token that was sampled from the draft's own law, whatever its rank there (rejection rule)."""
        return self._accepted / self._judged

    @property
    def first_rate(self) -> float:
        """How often the first guess is right, over all margins."""
        return sum(self._hits) / sum(self._trials)

    def probabilities(self, margin: float, num_ranks: int) -> list[float]:
        """Of the guesses at ranks 0 … num_ranks - 1 where the first guess has this margin."""
        bucket = bisect_right(_EDGES, margin)
        first = self._hits[bucket] / self._trials[bucket]
        rest = (1.0 - first) / self._misses
        behind = [rest * hits for hits in self._rank_hits[: num_ranks - 1]]
        return [first, *behind, *[0.0] * (num_ranks - 1 - len(behind))]

    def learn(self, margin: float, rank: int | None) -> None:
        """The target's token was the guess at `rank`, or none of those kept (None)."""
        bucket = bisect_right(_EDGES, margin)
        self._hits[bucket] = self._hits[bucket] * _FORGETTING + (rank == 0)
        self._trials[bucket] = self._trials[bucket] * _FORGETTING + 1.0
        if rank == 0:
            return
        self._misses = self._misses * _FORGETTING + 1.0
        self._rank_hits = [hits * _FORGETTING for hits in self._rank_hits]
        if rank is not None and rank <= len(self._rank_hits):
            self._rank_hits[rank - 1] += 1.0

    def learn_acceptance(self, *, accepted: bool) -> None:
        """A sampled token was accepted, or not."""
        self._accepted = self._accepted * _FORGETTING + accepted
        self._judged = self._judged * _FORGETTING + 1.0
