"""Autoscaling: as many replicas as the load reported by the running ones asks for.

Tokens do not pass through Serve, so its own request counts say nothing about an engine. Targets
and drafts report `load` (1.0 = full) through `record_autoscaling_stats`; the policy below runs in
Serve's controller.
"""

import math
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from outrider_cluster.sections import AutoscalingSettings

__all__ = ["by_load", "by_open_requests", "load_policy", "wanted_replicas"]

_KEY = "load"
_POLICY = "outrider_cluster.scaling:load_policy"


def by_load(settings: AutoscalingSettings) -> AutoscalingConfig:
    """For deployments that report `load`."""
    return AutoscalingConfig(
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        # The policy has no other place to read the wanted load from.
        target_ongoing_requests=settings.target_load,
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=settings.downscale_delay_s,
        policy=AutoscalingPolicy(policy_function=_POLICY),  # type: ignore[no-untyped-call]
    )


def by_open_requests(settings: AutoscalingSettings, *, places: int) -> AutoscalingConfig:
    """For routers, whose requests Serve does see; `places` is what one replica holds."""
    return AutoscalingConfig(
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        target_ongoing_requests=settings.target_load * places,
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=settings.downscale_delay_s,
    )


def load_policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy. Returns the number of replicas and the (unchanged) policy state."""
    reported = (context.aggregated_metrics or {}).get(_KEY, {})
    wanted_load = context.config.target_ongoing_requests if context.config is not None else None
    wanted = wanted_replicas(list(reported.values()), wanted_load=wanted_load or 1.0)
    if not reported:
        wanted = context.target_num_replicas
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(wanted, low), high), context.policy_state


def wanted_replicas(loads: list[float], *, wanted_load: float) -> int:
    """Replicas over which the sum of `loads` comes to at most `wanted_load` each; at least one."""
    # Rounded first: 0.7 + 0.7 over 0.7 is two replicas, not three.
    return max(1, math.ceil(round(sum(loads) / wanted_load, 6)))
