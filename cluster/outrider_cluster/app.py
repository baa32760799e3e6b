"""Binds the plain classes to Serve: one application, whose arguments never change.

Everything that may change while it runs travels as `user_config`, one for each deployment. A change
of an argument would redeploy every deployment.
"""

from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application, Deployment

from outrider.core.errors import ConfigError
from outrider_cluster.draft_deployment import DraftReplica
from outrider_cluster.placement import FRONT_CPUS, rank_bundles
from outrider_cluster.router_deployment import RouterIngress
from outrider_cluster.scaling import autoscaling_config
from outrider_cluster.sections import DraftSettings
from outrider_cluster.sections.base import Scaled
from outrider_cluster.settings import Settings, load_settings, settings_of
from outrider_cluster.target_deployment import TargetFront

__all__ = ["APPLICATION", "DRAFT", "ROUTER", "TARGET", "build", "build_app", "user_configs"]

APPLICATION = "outrider"
"""Name of the application."""
ROUTER, TARGET, DRAFT = "Router", "Target", "Draft"
"""Names of its deployments."""

_MANY_CALLS = 100
"""Control calls that may be open at once: a few per router, front and operator."""


def build(args: dict[str, Any]) -> Application:
    """For Serve's configuration files: `import_path: outrider_cluster.app:build`.

    `args` holds either `settings`, the content of a configuration, or `config`, the path of one.
    Raises `ConfigError` naming the field.
    """
    if set(args) == {"settings"}:
        return build_app(settings_of(args["settings"], origin="args.settings"))
    if set(args) == {"config"} and isinstance(args["config"], str):
        return build_app(load_settings(Path(args["config"])))
    raise ConfigError(f"args: give settings (a mapping) or config (a path), and nothing else, not {sorted(args)}")


def user_configs(settings: Settings) -> dict[str, dict[str, Any]]:
    """The `user_config` of every deployment, by name."""
    names = [ROUTER, TARGET] if settings.active_draft is None else [ROUTER, TARGET, DRAFT]
    return {name: settings.model_dump(mode="json") for name in names}


def build_app(settings: Settings) -> Application:
    """The application for these settings."""
    draft = settings.active_draft
    drafts = None if draft is None else _draft(settings, draft).bind()
    return _router(settings).bind(_target(settings).bind(drafts))


def _router(settings: Settings) -> Deployment:
    router = settings.router
    scaling: dict[str, Any] = {"num_replicas": router.num_replicas or 1}
    if router.autoscaling is not None:
        scaling = {"autoscaling_config": autoscaling_config(router.autoscaling, places=router.max_running_requests)}
    if router.max_replicas_per_node is not None:
        scaling["max_replicas_per_node"] = router.max_replicas_per_node
    made: Deployment = serve.deployment(
        name=ROUTER,
        ray_actor_options={"num_cpus": router.num_cpus, **_on_nodes(router)},
        # Admission refuses with a reason and a time to come back; Serve's own queue must not come first.
        max_ongoing_requests=2 * router.max_running_requests + _MANY_CALLS,
        max_surge_percent=router.max_surge_percent,
        **scaling,
        **_common(settings),
    )(RouterIngress)
    return made


def _target(settings: Settings) -> Deployment:
    target = settings.target
    scaling: dict[str, Any] = {"num_replicas": target.num_replicas or 1}
    if target.autoscaling is not None:
        scaling = {"autoscaling_config": autoscaling_config(target.autoscaling)}
    made: Deployment = serve.deployment(
        name=TARGET,
        ray_actor_options={"num_cpus": FRONT_CPUS},
        placement_group_bundles=rank_bundles(target),
        placement_group_strategy="STRICT_PACK",
        **_bundles_on_nodes(target),
        max_ongoing_requests=_MANY_CALLS,
        max_surge_percent=target.max_surge_percent,
        **scaling,
        **_common(settings),
    )(TargetFront)
    return made


def _draft(settings: Settings, draft: DraftSettings) -> Deployment:
    scaling: dict[str, Any] = {"num_replicas": draft.num_replicas or 1}
    if draft.autoscaling is not None:
        scaling = {"autoscaling_config": autoscaling_config(draft.autoscaling)}
    made: Deployment = serve.deployment(
        name=DRAFT,
        ray_actor_options={"num_cpus": draft.num_cpus, "num_gpus": draft.num_gpus, **_on_nodes(draft)},
        max_ongoing_requests=_MANY_CALLS,
        max_surge_percent=draft.max_surge_percent,
        **scaling,
        **_common(settings),
    )(DraftReplica)
    return made


def _on_nodes(scaled: Scaled) -> dict[str, Any]:
    return {"label_selector": scaled.node_labels} if scaled.node_labels else {}


def _bundles_on_nodes(scaled: Scaled) -> dict[str, Any]:
    # One selector stands for every bundle.
    return {"placement_group_bundle_label_selector": [scaled.node_labels]} if scaled.node_labels else {}


def _common(settings: Settings) -> dict[str, Any]:
    return {
        # Every look-up of the directory would be a line.
        "logging_config": {"enable_access_log": False, "encoding": settings.telemetry.log_format.upper()},
        "user_config": settings.model_dump(mode="json"),
        "health_check_period_s": settings.ray.health_check_period_s,
        "health_check_timeout_s": settings.ray.health_check_timeout_s,
        "graceful_shutdown_timeout_s": settings.ray.graceful_shutdown_s,
        "graceful_shutdown_wait_loop_s": min(1.0, settings.ray.graceful_shutdown_s),
    }
