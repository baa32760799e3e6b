"""The manifests of infra/k8s against the schemas of what they declare, and against each other."""

import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from pydantic import BaseModel
from ray.serve.schema import ServeDeploySchema
from tests.support.manifests import OVERLAYS, ROOT, closed, defaulted, of_kind, rendered

from outrider import __version__
from outrider_cluster.placement import rank_bundles, replica_bounds
from outrider_cluster.settings import Settings

# Published with the project's plans, beside the checkout: read from there, never copied.
RAYSERVICE_SCHEMA = ROOT.parent / "shared" / "schemas" / "rayservice-v1.schema.json"
OWN_KINDS = {"RayService", "PodMonitor", "GRPCRoute", "HTTPRoute", "Issuer", "Certificate"}
"""Kinds that Kubernetes itself does not know."""


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return rendered(request.param)


@pytest.fixture
def rayservice(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (one,) = of_kind(objects, "RayService")
    return one


@pytest.fixture
def settings(rayservice: dict[str, Any]) -> Settings:
    (application,) = yaml.safe_load(rayservice["spec"]["serveConfigV2"])["applications"]
    return Settings.model_validate(application["args"]["settings"])


def groups(rayservice: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["groupName"]: one for one in rayservice["spec"]["rayClusterConfig"]["workerGroupSpecs"]}


def container(group: dict[str, Any]) -> dict[str, Any]:
    (one,) = group["template"]["spec"]["containers"]
    return dict(one)


def pod_templates(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (service,) = of_kind(objects, "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    made = [cluster["headGroupSpec"]["template"], *(one["template"] for one in cluster["workerGroupSpecs"])]
    made += [one["spec"]["template"] for kind in ("Job", "StatefulSet") for one in of_kind(objects, kind)]
    return made


def test_core_kinds_are_valid_without_unknown_keys(objects: list[dict[str, Any]]) -> None:
    core = [one for one in objects if one["kind"] not in OWN_KINDS]
    assert {one["kind"] for one in core} >= {"Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy", "Job"}
    for one in core:
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


def test_pod_templates_are_valid_without_unknown_keys(objects: list[dict[str, Any]]) -> None:
    for template in pod_templates(objects):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **template["metadata"]}}
        kubernetes_validate.validate(
            {**pod, "spec": template["spec"]}, kubernetes_validate.latest_version(), strict=True
        )


def test_the_rayservice_fits_its_schema(rayservice: dict[str, Any]) -> None:
    if not RAYSERVICE_SCHEMA.is_file():
        pytest.skip(f"the RayService v1 schema is not at {RAYSERVICE_SCHEMA}")
    schema = closed(json.loads(RAYSERVICE_SCHEMA.read_text())["schema"])
    # The CRD leaves metadata to Kubernetes.
    schema["properties"]["metadata"] = {"type": "object"}
    rayservice = defaulted(rayservice, schema)
    (head,) = rayservice["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {one["protocol"] for one in head["ports"]} == {"TCP"}, "as an API server would fill it in"
    checker = jsonschema.Draft202012Validator(schema)
    assert [f"{error.json_path}: {error.message}" for error in checker.iter_errors(rayservice)] == []
    # The check can fail: a misspelt key two levels down.
    rayservice = json.loads(json.dumps(rayservice))
    rayservice["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParam"] = {}
    assert not checker.is_valid(rayservice)


def test_the_declared_application_fits_serves_schema(rayservice: dict[str, Any]) -> None:
    declared = yaml.safe_load(rayservice["spec"]["serveConfigV2"])
    assert unknown_keys(declared, ServeDeploySchema.model_validate(declared)) == []
    assert unknown_keys({"applications": [], "prxy_location": 1}, ServeDeploySchema(applications=[])) == [
        "prxy_location"
    ]


def unknown_keys(given: Any, parsed: Any, path: str = "") -> list[str]:
    """Keys that pydantic passed over, which Serve would ignore."""
    if isinstance(given, list):
        return [
            found
            for index, (one, made) in enumerate(zip(given, parsed, strict=True))
            for found in unknown_keys(one, made, f"{path}[{index}]")
        ]
    if not isinstance(given, dict) or not isinstance(parsed, BaseModel):
        return []
    found = []
    for key, value in given.items():
        here = f"{path}.{key}".lstrip(".")
        if key not in type(parsed).model_fields:
            found.append(here)
        else:
            found += unknown_keys(value, getattr(parsed, key), here)
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_declaration_is_what_the_command_writes(overlay: str) -> None:
    from outrider_cluster.declaration import as_rayservice_patch, declaration
    from outrider_cluster.settings import load_settings

    folder = ROOT / "infra" / "k8s" / "overlays" / overlay
    wanted = as_rayservice_patch(declaration(load_settings(folder / "outrider.yaml")), name="outrider")
    assert (folder / "serve-config.yaml").read_text() == wanted, "regenerate it: see the head of outrider.yaml"


def test_versions_are_those_of_the_package(rayservice: dict[str, Any], objects: list[dict[str, Any]]) -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    ray = re.search(r"^ray==(\S+)$", constraints, re.MULTILINE)
    assert ray is not None
    assert rayservice["spec"]["rayClusterConfig"]["rayVersion"] == ray[1]
    images = {one["image"] for template in pod_templates(objects) for one in template["spec"]["containers"]}
    own = {one for one in images if "outrider" in one}
    assert own == {f"registry.example.com/outrider:{__version__}"}
    assert all(re.search(r":[\w.-]*\d", one) for one in images), "every image carries a version"


def test_every_replica_fits_into_a_pod_of_its_group(rayservice: dict[str, Any], settings: Settings) -> None:
    bundles = rank_bundles(settings.target)
    assert settings.draft is not None
    needs = {
        "target": (sum(one["CPU"] for one in bundles), sum(one.get("GPU", 0) for one in bundles)),
        "draft": (settings.draft.num_cpus, settings.draft.num_gpus),
        "router": (settings.router.num_cpus, 0),
    }
    for name, (cpus, gpus) in needs.items():
        group = groups(rayservice)[name]
        limits = container(group)["resources"]["limits"]
        held = float(group["rayStartParams"].get("num-cpus", limits["cpu"]))
        assert math.floor(held / cpus) == 1, f"{name}: a pod holds one replica"
        assert int(limits.get("nvidia.com/gpu", 0)) == gpus, f"{name}: GPUs of the pod are those of its replica"


def test_labels_and_bounds_of_settings_and_groups_agree(rayservice: dict[str, Any], settings: Settings) -> None:
    for name in ("target", "draft", "router"):
        section = getattr(settings, name)
        group = groups(rayservice)[name]
        assert section.node_labels == group["labels"], name
        assert replica_bounds(section) == (group["minReplicas"], group["maxReplicas"]), name


def test_ports_agree(rayservice: dict[str, Any], objects: list[dict[str, Any]], settings: Settings) -> None:
    for group in groups(rayservice).values():
        ports = {one["name"]: one["containerPort"] for one in container(group)["ports"]}
        assert ports == {"serve": settings.http.port, "serve-grpc": settings.grpc.port, "metrics": 8080}
    backends = {
        kind: route["spec"]["rules"][0]["backendRefs"][0]
        for kind in ("GRPCRoute", "HTTPRoute")
        for route in of_kind(objects, kind)
    }
    # KubeRay makes this Service's ports from those of the head's container whose names start with "serve".
    (head,) = rayservice["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    offered = {one["name"]: one["containerPort"] for one in head["ports"] if one["name"].startswith("serve")}
    assert offered == {"serve": settings.http.port, "serve-grpc": settings.grpc.port}
    service = f"{rayservice['metadata']['name']}-serve-svc"
    assert backends["GRPCRoute"] == {"name": service, "port": settings.grpc.port}
    assert backends["HTTPRoute"] == {"name": service, "port": settings.http.port}


def test_routes_of_different_kinds_share_no_host(objects: list[dict[str, Any]]) -> None:
    """A gateway would accept only one of the two."""
    hosts = {kind: set(of_kind(objects, kind)[0]["spec"]["hostnames"]) for kind in ("GRPCRoute", "HTTPRoute")}
    assert hosts["GRPCRoute"]
    assert hosts["HTTPRoute"]
    assert not hosts["GRPCRoute"] & hosts["HTTPRoute"]


def test_kuberay_names_the_pods(rayservice: dict[str, Any]) -> None:
    """Its Services select by labels that it sets itself, but only where a template has not set them."""
    cluster = rayservice["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        labels = group["template"]["metadata"]["labels"]
        assert not {"app.kubernetes.io/name", "app.kubernetes.io/created-by"} & labels.keys()


def test_pods_outlive_a_draining_replica(rayservice: dict[str, Any], settings: Settings) -> None:
    for group in groups(rayservice).values():
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > settings.ray.graceful_shutdown_s


def test_every_kind_of_pod_is_probed_watched_and_evicted_one_at_a_time(
    objects: list[dict[str, Any]], rayservice: dict[str, Any]
) -> None:
    for group in groups(rayservice).values():
        # KubeRay gives the head its probes.
        assert {"livenessProbe", "readinessProbe"} <= container(group).keys(), group["groupName"]
    cluster = rayservice["spec"]["rayClusterConfig"]
    templates = [one["template"] for one in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    (monitor,) = of_kind(objects, "PodMonitor")
    guards = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "NetworkPolicy")}
    for template in templates:
        labels = template["metadata"]["labels"].items()
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels
        assert guards["outrider-cluster"]["podSelector"]["matchLabels"].items() <= labels
        budgets = [
            one["spec"]["maxUnavailable"]
            for one in of_kind(objects, "PodDisruptionBudget")
            if one["spec"]["selector"]["matchLabels"].items() <= labels
        ]
        assert budgets == [1]


def test_replicas_read_models_from_the_cache_that_the_job_fills(
    objects: list[dict[str, Any]], rayservice: dict[str, Any]
) -> None:
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    (job,) = of_kind(objects, "Job")
    readers = [(one["groupName"], one["template"]["spec"]) for one in groups(rayservice).values()]
    for name, pod in [("fetch", job["spec"]["template"]["spec"]), *readers]:
        volumes = {one["name"]: one.get("persistentVolumeClaim", {}).get("claimName") for one in pod["volumes"]}
        (mounted,) = (one for one in pod["containers"][0]["volumeMounts"] if one["mountPath"] == "/models")
        assert volumes[mounted["name"]] == claim["metadata"]["name"], name
        assert mounted.get("readOnly", False) is (name != "fetch")


def test_selectors_find_pods(objects: list[dict[str, Any]]) -> None:
    labels = [one["metadata"]["labels"].items() for one in pod_templates(objects)]
    selectors = [one["spec"]["selector"]["matchLabels"] for one in of_kind(objects, "PodDisruptionBudget")]
    selectors += [one["spec"]["podSelector"]["matchLabels"] for one in of_kind(objects, "NetworkPolicy")]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in of_kind(objects, "PodMonitor")]
    for selector in selectors:
        assert any(selector.items() <= one for one in labels), selector


def test_no_pod_runs_as_root_or_may_become_more(objects: list[dict[str, Any]]) -> None:
    for template in pod_templates(objects):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        for one in spec["containers"]:
            assert one["securityContext"]["allowPrivilegeEscalation"] is False
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert one["resources"]["limits"]["memory"]
    (service,) = of_kind(objects, "RayService")
    beside_the_head = service["spec"]["rayClusterConfig"]["autoscalerOptions"]["securityContext"]
    assert beside_the_head == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_the_head_runs_no_replica_and_its_state_outlives_it(rayservice: dict[str, Any]) -> None:
    cluster = rayservice["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert (cluster["enableInTreeAutoscaling"], cluster["autoscalerOptions"]["version"]) == (True, "v2")


def test_files_that_the_settings_name_are_mounted(rayservice: dict[str, Any], settings: Settings) -> None:
    tls = settings.data_plane.tls
    assert tls is not None
    assert settings.security.api_keys_file is not None
    needed = {name: [tls.cert_file, tls.key_file, tls.ca_file] for name in ("target", "draft", "router")}
    needed["router"].append(settings.security.api_keys_file)
    for name, paths in needed.items():
        group = groups(rayservice)[name]
        mounts = {one["mountPath"]: one["name"] for one in container(group)["volumeMounts"]}
        volumes = {one["name"] for one in group["template"]["spec"]["volumes"]}
        for path in paths:
            assert mounts[str(Path(path).parent)] in volumes, (name, path)


def test_the_certificate_names_what_peers_check(objects: list[dict[str, Any]], settings: Settings) -> None:
    (served,) = (one for one in of_kind(objects, "Certificate") if one["spec"]["secretName"] == "outrider-tls")
    assert settings.data_plane.tls is not None
    assert served["spec"]["dnsNames"] == [settings.data_plane.tls.server_name]
    assert set(served["spec"]["usages"]) == {"server auth", "client auth"}


def test_no_manifest_holds_a_secret() -> None:
    for path in Path(ROOT / "infra" / "k8s").rglob("*.yaml"):
        assert "kind: Secret" not in path.read_text(), path


def test_replicas_are_bound_to_the_nodes_of_their_group(settings: Settings) -> None:
    built = {one.name: one for one in deployments_of(settings)}
    target = built["Target"]._replica_config
    assert target.placement_group_bundle_label_selector == [{"outrider-role": "target"}] * len(
        target.placement_group_bundles
    )
    for name in ("Router", "Draft"):
        assert built[name].ray_actor_options["label_selector"] == {"outrider-role": name.lower()}


def deployments_of(settings: Settings) -> list[Any]:
    """All deployments of the application, by the reference that each passes to the next."""
    from outrider_cluster.app import build_app

    found = []
    here: Any = build_app(settings)
    while here is not None:
        found.append(here._bound_deployment)
        here = next(iter(here._bound_deployment.init_args), None)
    return found
