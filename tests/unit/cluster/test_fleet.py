"""What the status says of nodes and deployments; neither Ray nor Serve runs."""

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray
from ray import serve

from outrider.core.fleet import DeploymentStatus, NodeStatus
from outrider.router.timing import LoopTime
from outrider.telemetry.recent_errors import RecentErrors
from outrider_cluster.fleet import FleetReader


@dataclass
class Value:
    value: str


@dataclass
class Deployment:
    status: Value
    message: str = ""
    replica_states: dict[str, int] = field(default_factory=dict)


@dataclass
class Application:
    deployments: dict[str, Deployment]


@dataclass
class Status:
    applications: dict[str, Application]


def node(address: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": resources}


def reader(application: str) -> FleetReader:
    return FleetReader(application, RecentErrors(LoopTime()))


@pytest.fixture
def control_plane(monkeypatch: pytest.MonkeyPatch) -> Status:
    status = Status({"outrider": Application({})})
    nodes = [node("10.0.0.2", alive=False), node("10.0.0.1", CPU=8.0, GPU=4.0)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(serve, "status", lambda: status)
    return status


async def test_lost_nodes_come_last_and_sick_deployments_say_why(control_plane: Status) -> None:
    control_plane.applications["outrider"].deployments.update(
        Router=Deployment(Value("HEALTHY"), "all well", {"RUNNING": 2}),
        Target=Deployment(Value("UNHEALTHY"), "Traceback:\n  line 3\n\nrank 1: died\n", {"RUNNING": 1, "STARTING": 2}),
    )
    found = await reader("outrider").read()
    assert found.nodes == (
        NodeStatus(address="10.0.0.1", alive=True, cpus=8.0, gpus=4.0),
        NodeStatus(address="10.0.0.2", alive=False),
    )
    assert found.deployments == (
        DeploymentStatus(name="Router", state="healthy", running=2),
        DeploymentStatus(name="Target", state="unhealthy", running=1, other=2, message="rank 1: died"),
    )


async def test_an_application_that_serve_does_not_know_has_no_deployments(control_plane: Status) -> None:
    assert (await reader("other").read()).deployments == ()


async def test_a_control_plane_that_fails_leaves_a_status_that_says_so(
    control_plane: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Status:
        raise ConnectionError("no controller")

    monkeypatch.setattr(serve, "status", broken)
    found = await reader("outrider").read()
    assert (found.nodes, found.deployments) == ((), ())
    assert [one.text for one in found.recent_errors] == ["the control plane does not answer"]


async def test_a_control_plane_that_hangs_is_asked_once(control_plane: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    released = threading.Event()

    def hanging() -> Status:
        asked.append(threading.current_thread().name)
        released.wait(60)
        return control_plane

    monkeypatch.setattr(serve, "status", hanging)
    monkeypatch.setattr("outrider_cluster.fleet._TIMEOUT_S", 0.01)
    one = reader("outrider")
    for _ in range(3):
        assert (await one.read()).nodes == ()
    assert len(asked) == 1
    released.set()
    monkeypatch.setattr("outrider_cluster.fleet._TIMEOUT_S", 60.0)
    assert len((await one.read()).nodes) == 2
