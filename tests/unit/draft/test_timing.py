"""What a draft step of some width takes, by what was measured."""

import pytest

from outrider.draft.timing import StepTimer


def timer_of(**milliseconds: float) -> StepTimer:
    """A timer that has seen one step of each width: `w1=1.0` is one branch in a millisecond."""
    timer = StepTimer()
    for width, one in milliseconds.items():
        timer.record(one / 1e3, num_branches=int(width[1:]))
    return timer


def test_nothing_is_known_before_the_first_step() -> None:
    timer = StepTimer()
    assert (timer.recent_ms, timer.single_ms, timer.expected_ms(8)) == (0.0, 0.0, 0.0)


def test_a_width_stands_for_its_power_of_two() -> None:
    timer = timer_of(w1=1.0, w20=3.0)
    assert timer.expected_ms(16) == timer.expected_ms(31) == 3.0


def test_a_width_above_all_seen_is_worth_a_try() -> None:
    assert timer_of(w1=1.0, w4=2.0).expected_ms(64) == 2.0


def test_a_width_between_two_seen_lies_between_them() -> None:
    timer = timer_of(w1=1.0, w64=64.0)
    assert timer.expected_ms(32) == pytest.approx(32.0, rel=0.02)
    assert timer.expected_ms(2) == pytest.approx(2.0, rel=0.02)


def test_a_slow_width_comes_within_reach_again() -> None:
    timer = timer_of(w64=64.0)
    for _ in range(5000):
        timer.record(1e-3, num_branches=1)
    assert timer.expected_ms(64) == pytest.approx(1.0, abs=0.5)
    assert timer.single_ms == pytest.approx(1.0)


def test_one_slow_step_counts_as_twice_the_mean() -> None:
    timer = timer_of(w1=1.0)
    timer.record(1.0, num_branches=1)
    assert timer.single_ms == pytest.approx(1.1)
