"""Deploy and redeploy the application the way `serve deploy` and KubeRay do: by a declared state.

Serve compares each declaration with the one before. As long as `args` and placement are the same,
only `reconfigure` of the running replicas is called, and replicas that start later get the same. Other
`args` are a new version: Serve replaces replica by replica, and each drains before it goes.
"""

import time
from typing import Any

from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import (
    ApplicationStatus,
    DeploymentSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from outrider.core.errors import ConfigError, EngineUnavailable
from outrider_cluster.app import APPLICATION, ROUTER, TARGET, user_configs
from outrider_cluster.live import Change, change_between
from outrider_cluster.scaling import application_policy
from outrider_cluster.settings import Settings

__all__ = ["Deployer"]

_LOOK_AGAIN_S = 0.1
# States of a deployment; Serve's own enum of them is private.
_HEALTHY = "HEALTHY"
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


class Deployer:
    """The application of one `outrider serve`. Its arguments are those of the last rolling change."""

    def __init__(self, settings: Settings) -> None:
        """Deploys nothing yet."""
        self._built_from = settings
        self._applied = settings

    def deploy(self, timeout_s: float) -> None:
        """Deploy, and return once router and front are up (the engine may still be loading).

        Raises `EngineUnavailable` saying what failed.
        """
        self._declare(self._built_from, built_from=self._built_from)
        self._wait(timeout_s)

    def update(self, settings: Settings) -> Change:
        """Apply other settings the gentlest way that applies them, and return which that is.

        A rolling change goes on after the return. Raises `ConfigError` naming the first field that only
        a restart changes; nothing has changed then.
        """
        change, field = change_between(self._applied, settings)
        if change is Change.RESTART:
            raise ConfigError(f"{field}: a change here takes a restart")
        built_from = settings if change is Change.ROLLING else self._built_from
        self._declare(settings, built_from=built_from)
        self._built_from, self._applied = built_from, settings
        return change

    def _declare(self, settings: Settings, *, built_from: Settings) -> None:
        application = ServeApplicationSchema(
            name=APPLICATION,
            import_path="outrider_cluster.app:build",
            args={"settings": built_from.model_dump(mode="json")},
            autoscaling_policy=application_policy(built_from),
            deployments=[
                DeploymentSchema(name=name, user_config=config) for name, config in user_configs(settings).items()
            ],
        )
        # `serve.run` gives every deployment a new version each time, which restarts all of them.
        client: Any = _get_global_client()
        client.deploy_apps(ServeDeploySchema(applications=[application]))

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not _is_up():
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"Serve has not started the application within {timeout_s:g} s")
            # Another process's state, without a way to be told.
            time.sleep(_LOOK_AGAIN_S)


def _is_up() -> bool:
    """Whether router and target run. The draft does not count: it may come later, or never.

    Raises `EngineUnavailable` when one of the two, or the whole application, cannot start.
    """
    application = serve.status().applications.get(APPLICATION)
    if application is None:
        return False
    needed = [application.deployments.get(name) for name in (ROUTER, TARGET)]
    for one in needed:
        if one is not None and one.status.value in _FAILED:
            raise EngineUnavailable(f"Serve cannot start the application: {one.message}")
    if application.status is ApplicationStatus.DEPLOY_FAILED and None in needed:
        raise EngineUnavailable(f"Serve cannot start the application: {application.message}")
    return all(one is not None and one.status.value == _HEALTHY for one in needed)
