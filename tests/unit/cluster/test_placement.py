"""What a deployment reserves."""

from pathlib import Path

import pytest

from outrider_cluster.placement import rank_bundles, replica_bounds, resources_needed
from outrider_cluster.settings import default_settings, load_settings

SERVE = Path(__file__).parents[3] / "infra" / "serve"


def test_the_reference_group_is_four_gpus_beside_a_front_without_one() -> None:
    bundles = rank_bundles(load_settings(SERVE / "h100-4plus1.yaml").target)
    assert [bundle.get("GPU", 0) for bundle in bundles] == [0, 1, 1, 1, 1]


def test_resources_are_those_of_the_largest_deployment() -> None:
    needs = resources_needed(load_settings(SERVE / "h100-4plus1.yaml"))
    assert needs.gpus == 4 * (4 + 1)


def test_the_laptop_needs_no_gpu() -> None:
    needs = resources_needed(default_settings())
    assert needs.gpus == 0
    # Ranks, draft, front, router, and a second router while a change rolls.
    assert needs.cpus == pytest.approx(2 * 1 + 1 + 0.1 + 0.1 + 0.1)


def test_bounds_are_one_without_a_word() -> None:
    settings = default_settings()
    assert replica_bounds(settings.target) == (1, 1)
    assert replica_bounds(load_settings(SERVE / "h100-4plus1.yaml").router) == (2, 8)
