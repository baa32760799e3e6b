"""The analytic bound of each schedule (design, sections 5 and 6), with software that costs nothing.

For n sequences, acceptance a at every position, hop h, T(rows) a verify step and s(rows) a draft step:

- E(k) = 1 + a + … + a^k tokens a round.
- plain: 1 / T(n).
- sequential: E(k) / (T(n (1 + k)) + 2h + k s(n)).
- cached: a round with a block yields E(k), one without yields 1, and each takes
  max(T(rows), 2h + k s(n branches), h + (1 + k) s(n branches)): a table is under way for two hops and k
  steps, and what follows its blocks is drafted while it travels. With H the hit rate behind a round with
  a block and H0 behind one without, the share of rounds with a block is H0 / (1 - H + H0). One sequence
  alone may wait for a block of k' tokens after a miss instead: then E(k) / (step + (1 - H) (2h + k' s(1))),
  where a round after a miss yields E(k').
- H: the sum of the largest P_j r_i over accepted lengths j and ranks i, one for each branch.

Each bound is the mean of a schedule with one K. A run may lie a little above it: by chance, since a
thousand rounds know E within 2 %; because confidence that varies by position (`confidence_spread`)
leaves E unchanged but lets a draft that uses its margins hit more often than H; or because it chooses
K by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

from outrider.engine.emulated.device import DeviceProfile

__all__ = ["BoundModel", "expected_tokens", "outcome_hit_rate"]

_MAX_DRAFT_ROWS = 256


def expected_tokens(acceptance: float, k: int) -> float:
    """E(k): mean tokens of a round with a block of k tokens, its own token included."""
    return sum(acceptance**m for m in range(k + 1))


def outcome_hit_rate(acceptance: float, k: int, branches: int, rank_shares: Sequence[float]) -> float:
    """Chance that the outcome of a block of k tokens is among the `branches` likeliest; k = 0: no block."""
    chances = [(1 - acceptance) * acceptance**j * share for j in range(k) for share in rank_shares]
    chances.append(acceptance**k * acceptance)
    chances += [acceptance**k * (1 - acceptance) * share for share in rank_shares]
    return sum(nlargest(branches, chances))


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundModel:
    """Costs and chances of one emulated pair."""

    target: DeviceProfile
    draft: DeviceProfile
    hop_s: float
    acceptance: float
    rank_shares: tuple[float, ...]
    context_len: int = 0
    """Mean positions that a row attends to."""

    def plain(self, batch: int) -> float:
        """Tokens per second of each stream."""
        return 1 / self._verify_s(batch, batch)

    def sequential(self, batch: int, k: int) -> float:
        """Tokens per second of each stream."""
        step_s = self._verify_s(batch, batch * (1 + k)) + 2 * self.hop_s + k * self._draft_s(batch, 1)
        return expected_tokens(self.acceptance, k) / step_s

    def cached(self, batch: int, k: int, max_branches: int) -> float:
        """Tokens per second of each stream."""
        branches = max(1, min(max_branches, _MAX_DRAFT_ROWS // batch))
        hits = outcome_hit_rate(self.acceptance, k, branches, self.rank_shares)
        tokens = expected_tokens(self.acceptance, k)
        draft_s = self._draft_s(batch, branches)
        drafting_s = max(2 * self.hop_s + k * draft_s, self.hop_s + (1 + k) * draft_s)
        first_hits = outcome_hit_rate(self.acceptance, 0, branches, self.rank_shares)
        share = first_hits / (1 - hits + first_hits)
        step_s = max(self._verify_s(batch, batch * (1 + share * k)), drafting_s)
        best = (share * tokens + 1 - share) / step_s
        if batch == 1:
            step_s = max(self._verify_s(1, 1 + k), drafting_s)
            for waited in range(1, k + 1):
                wait_s = 2 * self.hop_s + waited * self._draft_s(1, 1)
                short_hits = outcome_hit_rate(self.acceptance, waited, branches, self.rank_shares)
                full = short_hits / (1 - hits + short_hits)  # share of rounds with the table's own blocks
                yielded = full * tokens + (1 - full) * expected_tokens(self.acceptance, waited)
                best = max(best, yielded / (step_s + (1 - full) * wait_s))
        return best

    def best(self, batch: int, max_k: int, max_branches: int) -> float:
        """Of every schedule with at most `max_k` draft tokens, the highest."""
        lengths = range(1, max_k + 1)
        sequential = [self.sequential(batch, k) for k in lengths]
        return max([self.plain(batch), *sequential, *(self.cached(batch, k, max_branches) for k in lengths)])

    def _verify_s(self, batch: int, rows: float) -> float:
        return self.target.step_s(rows=round(rows), kv_tokens=batch * self.context_len)

    def _draft_s(self, batch: int, branches: int) -> float:
        return self.draft.step_s(rows=batch * branches, kv_tokens=batch * self.context_len)
