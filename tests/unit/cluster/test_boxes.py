"""The configuration of several boxes: what must stay together, what may not, and what survives a loss."""

from pathlib import Path

import pytest

from outrider_cluster.app import build_app
from outrider_cluster.placement import replica_bounds
from outrider_cluster.settings import Settings, load_settings

SERVE = Path(__file__).parents[3] / "infra" / "serve"


@pytest.fixture
def boxes() -> Settings:
    return load_settings(SERVE / "h100-boxes.yaml")


def test_every_part_survives_the_loss_of_one_box(boxes: Settings) -> None:
    assert boxes.draft is not None
    assert [replica_bounds(one)[0] >= 2 for one in (boxes.target, boxes.draft, boxes.router)] == [True] * 3


def test_ranks_stay_in_one_box_and_the_draft_has_a_gpu_of_its_own(boxes: Settings) -> None:
    router = build_app(boxes)._bound_deployment
    (target,) = [one._bound_deployment for one in router.init_args]
    (draft,) = [one._bound_deployment for one in target.init_args]
    config = target._replica_config
    assert config.placement_group_strategy == "STRICT_PACK"
    assert router._replica_config.max_replicas_per_node == boxes.router.max_replicas_per_node
    assert [bundle.get("GPU", 0) for bundle in config.placement_group_bundles] == [0, 1, 1, 1, 1]
    assert draft.ray_actor_options["num_gpus"] == 1
    assert draft._replica_config.placement_group_bundles is None
    assert router._replica_config.ray_actor_options.get("num_gpus", 0) == 0


def test_targets_and_drafts_never_share_a_node(boxes: Settings) -> None:
    assert boxes.draft is not None
    assert boxes.target.node_labels["role"] != boxes.draft.node_labels["role"]


def test_nothing_between_the_boxes_is_open(boxes: Settings) -> None:
    assert boxes.data_plane.tls is not None
    assert boxes.security.api_keys_file is not None
    assert not boxes.ray.dashboard
