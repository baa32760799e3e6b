"""How many replicas a load asks for."""

import pytest

from outrider_cluster.scaling import wanted_replicas


@pytest.mark.parametrize(
    ("loads", "wanted_load", "expected"),
    [
        ([], 0.7, 1),
        ([0.0], 0.7, 1),
        ([0.7], 0.7, 1),
        ([0.71], 0.7, 2),
        ([0.7, 0.7], 0.7, 2),
        ([1.0, 1.0, 1.0], 0.5, 6),
        ([0.1, 0.1, 0.1], 0.7, 1),
        ([3.0], 1.0, 3),
    ],
)
def test_load_is_spread_to_the_wanted_level(loads: list[float], wanted_load: float, expected: int) -> None:
    assert wanted_replicas(loads, wanted_load=wanted_load) == expected
