"""How many outcomes to draft for: as many as bring the most tokens in the time that is left.

A branch more catches outcomes that would be misses, and makes every step of the table a little slower:
not at all where a step reads its weights and little else, as for tens of rows on an accelerator; much
on a CPU. Expected tokens of the m likeliest outcomes, each with p_i and k tokens drafted in time:

    G(m) = sum over i <= m of p_i * (a + a^2 + … + a^k),  k = min(K, time left / s(m)),  s(m) a step

with a the acceptance. (Kumar et al. 2026, arXiv 2603.03251, choose by the same trade-off offline.)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Candidate", "TableTime", "best_fan_out"]

_TOLERANCE = 0.25
"""Of a step: a token that would be this much too late is counted on."""
_SOME_S = 1e-4


@dataclass(frozen=True, slots=True)
class Candidate:
    """An outcome that may be drafted for."""

    table: int
    """Which table it is for: 0, 1, …"""
    probability: float


@dataclass(frozen=True, slots=True)
class TableTime:
    """What one table may take."""

    num_draft_tokens: int
    """K."""
    left_s: float
    """Until its tokens would be late; infinite where nobody waits."""

    def tokens_in_time(self, step_s: float) -> float:
        """Draft tokens of each block at this time a step. A part of one where not even the first fits: it may
        be in time all the same, and the less likely the longer it takes.
        """
        if not math.isfinite(self.left_s) or step_s <= 0.0:
            return self.num_draft_tokens
        whole = int(min(self.num_draft_tokens, self.left_s / step_s + _TOLERANCE))
        return whole if whole >= 1 else min(1.0, max(self.left_s, _SOME_S) / step_s)


def best_fan_out(
    candidates: Sequence[Candidate],
    tables: Sequence[TableTime],
    *,
    step_s: Callable[[int], float],
    acceptance: float,
) -> int:
    """How many of `candidates`, which come likeliest first, to draft for together.

    `step_s(m)`: seconds of a step with m branches. Sizes are tried in powers of two less one, for so the
    times are measured, and all of them.
    """
    mass = [0.0] * len(tables)
    best, best_tokens, next_size = 0, -1.0, 1
    for count, one in enumerate(candidates, start=1):
        mass[one.table] += one.probability
        if count < min(next_size, len(candidates)):
            continue
        next_size = 2 * next_size + 1
        seconds = step_s(count)
        tokens = 0.0
        for share, table in zip(mass, tables, strict=True):
            tokens += share * _tokens(acceptance, table.tokens_in_time(seconds))
        if tokens > best_tokens:
            best, best_tokens = count, tokens
    return best


def _tokens(acceptance: float, k: float) -> float:
    """Expected accepted tokens of a block of k."""
    if k < 1.0:
        return k * acceptance
    return k * acceptance if acceptance >= 1.0 else acceptance * (1.0 - acceptance**k) / (1.0 - acceptance)
