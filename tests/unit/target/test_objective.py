"""The gate's objective, against sums done by hand, and against brute force."""

import itertools
from dataclasses import replace

import pytest

from outrider.core.speculation import SpeculationMode
from outrider.target.objective import Estimates, Group, best_choice, best_wait, expected_tokens

PLAIN, SEQUENTIAL, CACHED = SpeculationMode.OFF, SpeculationMode.SEQUENTIAL, SpeculationMode.CACHED


def estimates(
    *, verify_s: float = 0.0135, per_row_s: float = 0.0, step_s: float = 0.0012, hit_rate: float = 0.8
) -> Estimates:
    return Estimates(
        verify_s=lambda rows: verify_s + per_row_s * rows, draft_step_s=step_s, hop_s=0.00025, hit_rate=hit_rate
    )


@pytest.mark.parametrize(("a", "k", "expected"), [(0.5, 1, 1.5), (0.5, 2, 1.75), (1.0, 7, 8.0), (0.0, 3, 1.0)])
def test_expected_tokens(a: float, k: int, expected: float) -> None:
    assert expected_tokens(a, k) == pytest.approx(expected)


def test_the_reference_pair_at_batch_one() -> None:
    """Verify 13.5 ms, draft step 1.2 ms, a = 0.85, hop 0.25 ms: 216 tok/s sequential, 318 cached at K = 7."""
    groups = {Group(0.85, 7): 1}
    sequential = best_choice(groups, estimates(), [SEQUENTIAL])
    cached = best_choice(groups, estimates(), [CACHED])
    tokens = expected_tokens(0.85, 7)
    assert sequential.tokens_per_s >= tokens / (0.0135 + 0.0005 + 7 * 0.0012)
    assert cached.tokens_per_s == pytest.approx((0.8 * tokens + 0.2) / 0.0135)
    assert best_choice(groups, estimates(), [PLAIN, SEQUENTIAL, CACHED]).mode is CACHED


def test_hopeless_drafts_are_left_off() -> None:
    choice = best_choice({Group(0.05, 7): 4}, estimates(per_row_s=0.0005), [PLAIN, SEQUENTIAL])
    assert choice.mode is PLAIN


def test_rows_that_cannot_speculate_still_count() -> None:
    choice = best_choice({Group(0.9, 0): 3, Group(0.9, 4): 1}, estimates(), [PLAIN, SEQUENTIAL])
    assert choice.num_draft_tokens.get(Group(0.9, 0), 0) == 0
    alone = best_choice({Group(0.9, 4): 1}, estimates(), [SEQUENTIAL])
    assert choice.tokens_per_s < alone.tokens_per_s + 3 / 0.0135


@pytest.mark.parametrize("per_row_s", [0.0, 0.0002, 0.001, 0.005])
@pytest.mark.parametrize("acceptances", [(0.4,), (0.9, 0.5), (0.85, 0.6, 0.2)])
@pytest.mark.parametrize("mode", [SEQUENTIAL, CACHED])
def test_the_sweep_finds_what_brute_force_finds(
    per_row_s: float, acceptances: tuple[float, ...], mode: SpeculationMode
) -> None:
    guess = estimates(per_row_s=per_row_s)
    groups = {Group(a, 5): 2 + index for index, a in enumerate(acceptances)}
    best = 0.0
    for lengths in itertools.product(range(6), repeat=len(groups)):
        if not any(lengths):
            continue
        share = guess.hit_rate_at(max(lengths)) if mode is CACHED else 1.0
        counts = list(groups.values())
        tokens = sum(
            count * (share * expected_tokens(a, k) + 1 - share)
            for a, k, count in zip(acceptances, lengths, counts, strict=True)
        )
        rows = sum(count * (1 + share * k) for k, count in zip(lengths, counts, strict=True))
        if mode is CACHED:
            table_s = 2 * guess.hop_s + max(lengths) * guess.draft_step_s
            seconds = max(guess.verify_s(rows), table_s, guess.hop_s + (1 + max(lengths)) * guess.draft_step_s)
        else:
            seconds = guess.verify_s(rows) + 2 * guess.hop_s + max(lengths) * guess.draft_step_s
        best = max(best, tokens / seconds)
    assert best_choice(groups, guess, [mode]).tokens_per_s >= 0.995 * best


def test_waiting_pays_alone_and_not_in_company() -> None:
    miss = {Group(0.85, 7): 1}
    assert best_wait(hit_rows=0, hit_tokens=0, misses=miss, estimates=estimates()) > 0
    tokens = 15 * expected_tokens(0.85, 7)
    assert best_wait(hit_rows=15 * 8, hit_tokens=tokens, misses=miss, estimates=estimates()) == 0


def test_a_wait_is_weighed_against_the_rounds_around_it() -> None:
    """Alone, a longer block for a miss would do; but while it is drafted, rounds with whole blocks could run."""
    miss = {Group(0.85, 7): 1}
    often = best_wait(hit_rows=0, hit_tokens=0, misses=miss, estimates=replace(estimates(), hit_rate=0.1))
    seldom = best_wait(hit_rows=0, hit_tokens=0, misses=miss, estimates=replace(estimates(), hit_rate=0.9))
    assert 0 < seldom < often
