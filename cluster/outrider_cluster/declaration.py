"""A deployment as the declared state that `serve deploy` and KubeRay apply.

Serve compares each declaration with the one before. As long as the application's arguments are the
same, changed settings only reach the running replicas' `reconfigure`; changed arguments replace them.
So a live change keeps the arguments of the declaration that is deployed.
"""

from pathlib import Path
from typing import Any

import yaml

from outrider.core.errors import ConfigError
from outrider_cluster.app import APPLICATION, user_configs
from outrider_cluster.live import fixed_difference
from outrider_cluster.ray_runtime import SERVICER_FUNCTIONS
from outrider_cluster.scaling import application_policy
from outrider_cluster.settings import Settings, settings_of

__all__ = ["as_rayservice_patch", "as_yaml", "declaration", "deployed_settings"]

_IMPORT_PATH = "outrider_cluster.app:build"


def declaration(settings: Settings, *, deployed: Settings | None = None) -> dict[str, Any]:
    """The content of a Serve configuration file (`serveConfigV2` of a RayService).

    `deployed`: the settings of the declaration that is running; what differs from it must be able to
    change live, and the arguments stay its own. Raises `ConfigError` naming the first field that
    takes new replicas, or a port that is not fixed.
    """
    for name in ("grpc", "http"):
        if not getattr(settings, name).port:
            raise ConfigError(f"{name}.port: a declared deployment needs a fixed port, not 0")
    fixed = None if deployed is None else fixed_difference(deployed, settings)
    if fixed is not None:
        raise ConfigError(f"{fixed}: a change here takes new replicas; declare it without the deployed one")
    # A constant of the running version, like the arguments: another one would replace every replica.
    scaling = application_policy(deployed or settings)
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": settings.http.host or "0.0.0.0", "port": settings.http.port},
        "grpc_options": {"port": settings.grpc.port, "grpc_servicer_functions": list(SERVICER_FUNCTIONS)},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": _IMPORT_PATH,
                "args": {"settings": _written(deployed or settings)},
                **({} if scaling is None else {"autoscaling_policy": scaling}),
                "deployments": [{"name": name, "user_config": _written(settings)} for name in user_configs(settings)],
            }
        ],
    }


def deployed_settings(path: Path) -> Settings:
    """The settings in a declaration's arguments: a Serve configuration file or a RayService.

    Raises `ConfigError` when the file holds neither.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
        if value.get("kind") == "RayService":
            value = yaml.safe_load(value["spec"]["serveConfigV2"])
        (application,) = (one for one in value["applications"] if one["name"] == APPLICATION)
        settings = application["args"]["settings"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a declaration of application {APPLICATION}: {error}") from error
    return settings_of(settings, origin=f"{path}: args.settings")


def as_yaml(declared: dict[str, Any]) -> str:
    """The declaration as a Serve configuration file."""
    return yaml.dump(declared, Dumper=_Plain, sort_keys=False, width=110)


def as_rayservice_patch(declared: dict[str, Any], *, name: str) -> str:
    """The declaration as a patch for the RayService `name`, as kustomize takes it."""
    body = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": name},
        "spec": {"serveConfigV2": _Block(as_yaml(declared))},
    }
    return yaml.dump(body, Dumper=_Plain, sort_keys=False)


def _written(settings: Settings) -> dict[str, Any]:
    """What the configuration file said; defaults stay defaults, so that a declaration can be read."""
    return settings.model_dump(mode="json", exclude_unset=True)


class _Block(str):
    """Text that keeps its lines."""

    __slots__ = ()


class _Plain(yaml.SafeDumper):
    """No anchors: operators edit these files."""

    def ignore_aliases(self, data: object) -> bool:
        """Whether a value that occurs twice is written twice: always."""
        return True


_Plain.add_representer(_Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))
