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


@pytest.mark.parametrize(("widths", "most"), [([], None), ([1], 3), ([1, 3], 7), ([1, 4], 15), ([64, 1], 255)])
def test_widths_are_tried_one_power_of_two_at_a_time(widths: list[int], most: int | None) -> None:
    assert timer_of(**{f"w{width}": 1.0 for width in widths}).most_to_try == most


def test_a_slow_width_that_is_tried_again_and_still_slow_is_left_alone_for_as_long_as_before() -> None:
    timer = timer_of(w7=70.0)
    waits = []
    for _ in range(3):
        waits.append(0)
        while timer.expected_ms(7) > 30.0:
            timer.record(10e-3, num_branches=1)
            waits[-1] += 1
        timer.record(70e-3, num_branches=7)
    assert waits[0] > 1000
    assert min(waits) > 0.6 * waits[0]


def test_a_slow_width_that_is_tried_again_and_fast_is_soon_believed() -> None:
    timer = timer_of(w7=70.0)
    while timer.expected_ms(7) > 30.0:
        timer.record(10e-3, num_branches=1)
    for _ in range(8):  # one table
        timer.record(10e-3, num_branches=7)
    assert timer.expected_ms(7) < 25.0


def test_few_branches_are_not_thought_slower_than_many() -> None:
    """Measured while the process started, and never again."""
    timer = timer_of(w1=100.0, w3=110.0, w16=12.0)
    assert timer.expected_ms(1) == timer.single_ms == timer.expected_ms(3) == timer.expected_ms(8) == 12.0
