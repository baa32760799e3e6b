"""Which mode and how many draft tokens give the most tokens per second for the whole batch.

For a batch with chance pi of having a block at hand, K_i draft tokens for row i of acceptance a_i:

    cached      G = sum(pi * E_i + 1 - pi) / max(T_v(n), 2h + K * s, h + (1 + K) * s),  n = sum(1 + pi * K_i)
    sequential  G = sum(E_i)               / (T_v(n) + 2h + K * s),                     n = sum(1 + K_i)
    plain       G = rows / T_v(rows)

with E_i = 1 + sum over m <= K_i of a_i^m, K the largest K_i, verify time T_v, hop h, draft step s. A table is
under way for two hops and K steps; one step more follows it while the target finishes. The best K_i follow
from adding draft tokens in the order of their chance to be accepted, as long as G grows.
(Leviathan et al. 2023, section 3; extended to batches and cached outcomes.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.core.speculation import SpeculationMode

__all__ = ["Choice", "Estimates", "Group", "best_choice", "best_of_mode", "best_wait", "expected_tokens"]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are alike."""

    acceptance: float
    """Chance that a draft token is accepted if those before it are."""
    max_draft_tokens: int
    """0: rows that cannot speculate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Measured times and rates."""

    verify_s: Callable[[float], float]
    """Seconds of a verify step by its rows."""
    draft_step_s: float
    hop_s: float
    """One way between target and draft."""
    hit_rate: float
    """Chance that the block of the outcome is at hand in cached mode, with blocks of `hit_length`."""
    hit_length: float = 7.0

    def hit_rate_at(self, length: int) -> float:
        """The same behind blocks of another length: longer ones have more outcomes, for as many branches.

        By the formula of the hit rate misses grow in proportion to K (from 0.125 at 5 to 0.275 at 10, at
        acceptance 0.85 and 24 branches).
        """
        misses = (1.0 - self.hit_rate) * length / max(self.hit_length, 1.0)
        return min(max(1.0 - misses, 0.0), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best plan for the next rounds."""

    mode: SpeculationMode
    num_draft_tokens: Mapping[Group, int]
    tokens_per_s: float
    """Expected, of the whole batch."""


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Expected tokens of a round: 1 + a + a^2 + … + a^K."""
    return 1.0 + sum(acceptance**m for m in range(1, num_draft_tokens + 1))


def best_choice(groups: Mapping[Group, int], estimates: Estimates, modes: Iterable[SpeculationMode]) -> Choice:
    """The best of these modes for a batch of `groups` (with their row counts)."""
    return max((best_of_mode(groups, estimates, mode) for mode in modes), key=lambda one: one.tokens_per_s)


def best_of_mode(groups: Mapping[Group, int], estimates: Estimates, mode: SpeculationMode) -> Choice:
    """The best plan of one mode, plain decoding included.

    For each length of the longest block, which is what drafting costs: below that length draft tokens
    cost verify rows alone, and enter by their chance, best first. A mode that has passed its best length
    by two is not followed further.
    """
    rows = sum(groups.values())
    best = Choice(mode=mode, num_draft_tokens={}, tokens_per_s=rows / max(estimates.verify_s(rows), 1e-9))
    if mode is SpeculationMode.OFF:
        return best
    candidates = sorted(
        ((group.acceptance**m, m, group) for group in groups for m in range(1, group.max_draft_tokens + 1)),
        key=lambda one: (-one[0], one[1]),
    )
    best_longest = 0
    for longest in range(1, max((group.max_draft_tokens for group in groups), default=0) + 1):
        found = _best_of_length(groups, [one for one in candidates if one[1] <= longest], estimates, mode, longest)
        if found.tokens_per_s > best.tokens_per_s:
            best, best_longest = found, longest
        elif best_longest and longest > best_longest + 1:
            break
    return best


def _best_of_length(
    groups: Mapping[Group, int],
    candidates: Sequence[tuple[float, int, Group]],
    estimates: Estimates,
    mode: SpeculationMode,
    longest: int,
) -> Choice:
    """The best plan whose longest block has at most `longest` tokens, from candidates best first."""
    cached = mode is SpeculationMode.CACHED
    share = estimates.hit_rate_at(longest) if cached else 1.0
    hop_s, step_s = estimates.hop_s, estimates.draft_step_s
    drafting_s = 2 * hop_s + longest * step_s
    if cached:
        drafting_s = max(drafting_s, hop_s + (1 + longest) * step_s)
    tokens = verified = float(sum(groups.values()))
    best_rate, best_count = 0.0, 0
    for count, (survival, _, group) in enumerate(candidates, start=1):
        tokens += share * survival * groups[group]
        verified += share * groups[group]
        verify_s = estimates.verify_s(verified)
        seconds = max(verify_s, drafting_s) if cached else verify_s + drafting_s
        rate = tokens / max(seconds, 1e-9)
        if rate > best_rate:
            best_rate, best_count = rate, count
    lengths = {group: m for _, m, group in candidates[:best_count]}
    return Choice(mode=mode, num_draft_tokens=lengths, tokens_per_s=best_rate)


def best_wait(*, hit_rows: float, hit_tokens: float, misses: Mapping[Group, int], estimates: Estimates) -> int:
    """Draft tokens worth waiting for after misses in cached mode; 0: go on without.

    `hit_tokens` are expected from the rows that have their block, `hit_rows` is what they verify.
    Waiting for k tokens delays every row of the batch by 2h + k * s, so it must bring more tokens than the
    batch makes in that time otherwise. Hence the k with the highest rate over this step and the rounds
    that go with it: H / (1 - H) of them have every block, for each that has a miss.
    """
    full_tokens = hit_tokens + sum(
        count * expected_tokens(g.acceptance, g.max_draft_tokens) for g, count in misses.items()
    )
    full_rows = hit_rows + sum(count * (1 + g.max_draft_tokens) for g, count in misses.items())
    rounds = estimates.hit_rate / max(1.0 - estimates.hit_rate, 1e-3)  # with every block, for each with misses
    rounds_s = rounds * estimates.verify_s(full_rows)
    best_k, best_rate = 0, 0.0
    longest = max((group.max_draft_tokens for group in misses), default=0)
    for k in range(longest + 1):
        gained = sum(count * expected_tokens(g.acceptance, min(k, g.max_draft_tokens)) for g, count in misses.items())
        rows = hit_rows + sum(count * (1 + min(k, g.max_draft_tokens)) for g, count in misses.items())
        wait_s = 2 * estimates.hop_s + k * estimates.draft_step_s if k else 0.0
        seconds = rounds_s + estimates.verify_s(rows) + wait_s
        rate = (rounds * full_tokens + hit_tokens + gained) / max(seconds, 1e-9)
        if rate > best_rate:
            best_k, best_rate = k, rate
    return best_k
