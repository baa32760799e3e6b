"""How many outcomes are drafted for follows from their chances and from what a step costs."""

import math
from collections.abc import Callable

import pytest

from outrider.draft.fan_out import Candidate, TableTime, best_fan_out

CHANCES = [0.3, 0.2, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01]
ONE_TABLE = [Candidate(0, chance) for chance in CHANCES]


def chosen(table: TableTime, step_s: Callable[[int], float], *, acceptance: float = 0.8) -> int:
    return best_fan_out(ONE_TABLE, [table], step_s=step_s, acceptance=acceptance)


def test_all_of_them_where_branches_cost_nothing() -> None:
    assert chosen(TableTime(7, 10e-3), lambda count: 1.2e-3) == len(CHANCES)


def test_all_of_them_where_nobody_waits() -> None:
    assert chosen(TableTime(7, math.inf), lambda count: 1.2e-3 * count) == len(CHANCES)


def test_few_where_each_branch_costs_a_step() -> None:
    # On a CPU a row more costs as much as the first: with time for 8 rows, 3 branches of 2 tokens hold
    # 0.6 * 1.44 expected tokens, 1 of 8 tokens 0.3 * 3.3, 7 of 1 token 0.83 * 0.8.
    assert chosen(TableTime(8, 8e-3), lambda count: 1e-3 * count) == 1
    # The less sure the tokens are, the more there is in breadth: 0.3 * 0.43, 0.6 * 0.39, 0.83 * 0.3.
    assert chosen(TableTime(8, 8e-3), lambda count: 1e-3 * count, acceptance=0.3) == 7


def test_a_token_that_fits_only_with_fewer_branches_decides() -> None:
    # Seven steps fit at up to seven branches, two at all twelve.
    assert chosen(TableTime(7, 7e-3), lambda count: 1e-3 if count <= 7 else 3.5e-3) == 7


def test_tables_share_the_branches_by_chance() -> None:
    # The second table has time for no token: its outcomes count little, but cost nothing beside the others.
    candidates = [Candidate(1, 0.5), Candidate(0, 0.4), Candidate(0, 0.3), Candidate(1, 0.3)]
    tables = [TableTime(5, 20e-3), TableTime(5, 1e-3)]
    assert best_fan_out(candidates, tables, step_s=lambda count: 4e-3, acceptance=1.0) == 4
    assert best_fan_out(candidates, tables, step_s=lambda count: 4e-3 if count < 4 else 40e-3, acceptance=1.0) == 3


def test_nothing_to_choose_from() -> None:
    assert best_fan_out([], [], step_s=lambda count: 1e-3, acceptance=0.8) == 0


@pytest.mark.parametrize(("left_s", "tokens"), [(7.8e-3, 7), (2.6e-3, 2), (0.5e-3, 0.5), (-1.0, 0.1), (math.inf, 7)])
def test_tokens_in_time(left_s: float, tokens: float) -> None:
    assert TableTime(7, left_s).tokens_in_time(1e-3) == pytest.approx(tokens)


@pytest.mark.parametrize(("left_s", "step_s", "tokens"), [(1e12, 1e-300, 7), (-1.0, 1e-6, 1.0)])
def test_tokens_in_the_time_of_a_step_that_takes_next_to_none(left_s: float, step_s: float, tokens: float) -> None:
    assert TableTime(7, left_s).tokens_in_time(step_s) == tokens
