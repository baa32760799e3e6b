"""What a deployment reserves in Ray: bundles, options of actors, and their sum."""

import math
from dataclasses import dataclass

from outrider_cluster.sections import AutoscalingSettings, DraftSettings, RouterSettings, TargetSettings
from outrider_cluster.settings import Settings

__all__ = ["FRONT_CPUS", "Resources", "rank_bundles", "replica_bounds", "resources_needed"]

FRONT_CPUS = 0.1
"""The front watches; it computes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Logical CPUs and GPUs."""

    cpus: float
    gpus: int


def rank_bundles(target: TargetSettings) -> list[dict[str, float]]:
    """Placement group of one target replica: the front in bundle 0, rank r in bundle r + 1."""
    rank: dict[str, float] = {"CPU": target.cpus_per_rank}
    if target.gpus_per_rank:
        rank["GPU"] = target.gpus_per_rank
    return [{"CPU": FRONT_CPUS}, *(dict(rank) for _ in range(target.tensor_parallel_size))]


def replica_bounds(scaled: TargetSettings | DraftSettings | RouterSettings) -> tuple[int, int]:
    """Fewest and most replicas of a deployment; the most outside of a rolling change."""
    following: AutoscalingSettings | None = scaled.autoscaling
    if following is not None:
        return following.min_replicas, following.max_replicas
    return scaled.num_replicas or 1, scaled.num_replicas or 1


def resources_needed(settings: Settings) -> Resources:
    """What the deployment takes at its largest, in the middle of a rolling change."""
    target, draft, router = settings.target, settings.active_draft, settings.router
    targets, routers = _most(target), _most(router)
    cpus = routers * router.num_cpus
    cpus += targets * (FRONT_CPUS + target.tensor_parallel_size * target.cpus_per_rank)
    gpus = targets * target.tensor_parallel_size * target.gpus_per_rank
    if draft is not None:
        drafts = _most(draft)
        cpus += drafts * draft.num_cpus
        gpus += drafts * draft.num_gpus
    return Resources(cpus=cpus, gpus=gpus)


def _most(scaled: TargetSettings | DraftSettings | RouterSettings) -> int:
    _, most = replica_bounds(scaled)
    return most + math.ceil(most * scaled.max_surge_percent / 100)
