"""What a key has left of its minute, in time that the test turns."""

import pytest

from outrider.core.errors import ConfigError
from outrider.router.rates import Budget


def test_a_minutes_worth_may_be_spent_at_once_and_comes_back_evenly() -> None:
    budget = Budget(60, now_s=0.0)
    for _ in range(60):
        assert budget.wait_s(1, 0.0) == 0
        budget.spend(1, 0.0)
    assert budget.wait_s(1, 0.0) == pytest.approx(1.0)
    assert budget.wait_s(1, 0.75) == pytest.approx(0.25)
    assert budget.wait_s(1, 1.0) == 0
    assert budget.wait_s(30, 1.0) == pytest.approx(29.0)


def test_an_overdrawn_budget_fills_up_first() -> None:
    budget = Budget(60, now_s=0.0)
    budget.spend(90, 0.0)
    assert budget.wait_s(1, 0.0) == pytest.approx(31.0)
    assert budget.wait_s(1, 31.0) == 0


def test_what_is_not_spent_is_kept_for_one_minute_only() -> None:
    budget = Budget(10, now_s=0.0)
    for _ in range(10):
        budget.spend(1, 3600.0)
    assert budget.wait_s(1, 3600.0) > 0


def test_a_request_larger_than_the_bucket_waits_for_a_full_one() -> None:
    budget = Budget(10, now_s=0.0)
    assert budget.wait_s(1000, 0.0) == 0


def test_another_rate_keeps_what_is_there() -> None:
    budget = Budget(60, now_s=0.0)
    budget.spend(50, 0.0)
    budget.resize(6, 0.0)
    assert budget.wait_s(6, 0.0) == 0
    budget.spend(6, 0.0)
    budget.resize(60, 0.0)
    assert budget.wait_s(1, 0.0) == pytest.approx(1.0)


def test_a_rate_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match="per_minute: 0 is below 1"):
        Budget(0, now_s=0.0)
