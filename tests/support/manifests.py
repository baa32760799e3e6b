"""Reading the Kubernetes manifests as the cluster would see them."""

import copy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

__all__ = ["OVERLAYS", "closed", "defaulted", "documents", "of_kind", "rendered"]

ROOT = Path(__file__).parents[2]
OVERLAYS = ("h100", "cpu")


def rendered(overlay: str) -> list[dict[str, Any]]:
    """All objects of an overlay, by `kubectl kustomize`. Skips the test where there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl, which renders the overlays, is not installed")
    done = subprocess.run(
        [kubectl, "kustomize", str(ROOT / "infra" / "k8s" / "overlays" / overlay)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a YAML stream."""
    return [one for one in yaml.safe_load_all(text) if one is not None]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The objects of one kind."""
    return [one for one in objects if one["kind"] == kind]


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy of a CRD's schema that refuses unknown keys and knows Kubernetes' extensions.

    An API server drops unknown keys silently; here they are errors.
    """
    made = copy.deepcopy(schema)
    _close(made)
    return made


def defaulted(value: Any, schema: dict[str, Any]) -> Any:
    """A copy of a value with what an API server fills in from a schema before it validates."""
    if isinstance(value, list):
        return [defaulted(one, schema.get("items", {})) for one in value]
    if not isinstance(value, dict):
        return value
    fields = schema.get("properties", {})
    others = schema.get("additionalProperties")
    missing = {key: one["default"] for key, one in fields.items() if "default" in one and key not in value}
    return {
        key: defaulted(one, fields.get(key, others if isinstance(others, dict) else {}))
        for key, one in {**copy.deepcopy(missing), **value}.items()
    }


def _close(node: Any) -> None:
    if isinstance(node, list):
        for one in node:
            _close(one)
    if not isinstance(node, dict):
        return
    if node.pop("x-kubernetes-int-or-string", False):
        node.pop("type", None)
        node.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    open_ended = node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node
    if isinstance(node.get("properties"), dict) and not open_ended:
        node["additionalProperties"] = False
    for key, value in node.items():
        if key not in {"default", "enum", "required"}:
            _close(value)
