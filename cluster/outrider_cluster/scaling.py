"""Autoscaling: as many replicas as the load asks for, and as many drafts as the targets need.

Tokens do not pass through Serve, so its own request counts say nothing about an engine. Targets report
their `demand`, in replicas (`core.load`), through `record_autoscaling_stats`. One policy for the whole
application runs in Serve's controller: it sees all deployments at once, and Serve applies each
deployment's bounds and delays to what it returns.

Drafts follow the targets that there are, never the other way round: a draft more or less changes no
target, and a target that is still draining keeps its draft.
"""

from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext

from outrider.core.scaling import follow, replicas_for
from outrider_cluster.sections import AutoscalingSettings
from outrider_cluster.settings import Settings

__all__ = ["DEMAND", "application_policy", "autoscaling_config", "policy"]

DEMAND = "demand"
"""Key of what a target reports: replicas that its work asks for."""

_POLICY = "outrider_cluster.scaling:policy"
# Names of deployments, as `app` gives them.
_ROUTER, _TARGET, _DRAFT = "Router", "Target", "Draft"


def autoscaling_config(settings: AutoscalingSettings, *, places: int = 1) -> AutoscalingConfig:
    """Bounds and delays of one deployment; `places` is what one replica holds, for routers."""
    return AutoscalingConfig(
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        # The policy reads the wanted load here: requests of a router, engines of a draft.
        target_ongoing_requests=settings.target_load * places,
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=settings.downscale_delay_s,
        metrics_interval_s=settings.measure_interval_s,
        look_back_period_s=settings.look_back_s,
    )


def application_policy(settings: Settings) -> dict[str, Any] | None:
    """`autoscaling_policy` of the application; None while every number of replicas is fixed."""
    sections = (settings.router, settings.target, settings.active_draft)
    if all(one is None or one.autoscaling is None for one in sections):
        return None
    return {"policy_function": _POLICY}


def policy(contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
    """Serve's autoscaling policy of an application: wanted replicas by deployment, and no state of its own.

    Deployments with a fixed number of replicas are not among `contexts`, except in their effects.
    """
    wanted: dict[Any, int] = {}
    targets: int | None = None
    for key, context in contexts.items():
        if context.deployment_name == _TARGET:
            wanted[key] = _targets(context)
            # What Serve has decided after its delays, and what still drains.
            targets = max(context.target_num_replicas, context.current_num_replicas)
    for key, context in contexts.items():
        if context.deployment_name == _DRAFT and targets is not None:
            wanted[key] = follow(targets, per_replica=_level(context))
        elif context.deployment_name == _ROUTER:
            demand = context.total_num_requests / _level(context)
            wanted[key] = replicas_for(demand, current=context.target_num_replicas)
    return wanted, {}


def _targets(context: AutoscalingContext) -> int:
    reported = (context.aggregated_metrics or {}).get(DEMAND, {})
    if not reported:
        return context.target_num_replicas
    return replicas_for(sum(reported.values()), current=context.target_num_replicas)


def _level(context: AutoscalingContext) -> float:
    level = context.config.target_ongoing_requests if context.config is not None else None
    return float(level or 1.0)
