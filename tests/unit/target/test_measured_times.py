"""Measured times: a step or an answer that something has held up once says little about those to come."""

import pytest

from outrider.target.link_times import LinkTimes
from outrider.target.step_times import VerifyTimes


def test_one_held_up_step_hardly_moves_the_estimate_and_slower_steps_do() -> None:
    times = VerifyTimes()
    for _ in range(5):
        times.observe(8, 0.0135)
    times.observe(8, 0.5)
    assert times.predict(8) < 1.11 * 0.0135
    for _ in range(80):
        times.observe(8, 0.05)
    assert times.predict(8) == pytest.approx(0.05, rel=0.05)


def test_a_first_step_of_no_time_is_no_bound_for_those_that_follow() -> None:
    times = VerifyTimes()
    times.observe(8, 0.0)
    times.observe(8, 0.0135)
    assert times.predict(8) == pytest.approx(0.0135)


def test_one_held_up_answer_hardly_moves_the_hop_and_a_slower_network_does() -> None:
    times = LinkTimes()
    times.start(step_ms=1.0)
    for _ in range(5):
        times.answered(0.003, 2)
    assert times.times.hop_s == pytest.approx(0.0005)
    times.answered(0.4, 2)
    assert times.times.hop_s < 0.001
    for _ in range(80):
        times.answered(0.012, 2)
    assert times.times.hop_s == pytest.approx(0.005, rel=0.05)
