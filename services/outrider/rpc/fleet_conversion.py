"""Status of the fleet: nodes, deployments and what went wrong lately."""

from collections.abc import Iterable

from outrider.core.fleet import DeploymentStatus, FleetStatus, NodeStatus, PastError
from outrider.v1 import generation_pb2 as pb

__all__ = ["errors_from_proto", "errors_to_proto", "fleet_from_proto", "fleet_to_proto"]


def errors_to_proto(errors: Iterable[PastError]) -> list[pb.PastError]:
    """Seconds to milliseconds."""
    return [pb.PastError(text=one.text, age_ms=one.age_s * 1e3) for one in errors]


def errors_from_proto(messages: Iterable[pb.PastError]) -> tuple[PastError, ...]:
    """Milliseconds to seconds."""
    return tuple(PastError(text=one.text, age_s=one.age_ms / 1e3) for one in messages)


def fleet_to_proto(fleet: FleetStatus) -> pb.GetSpeculationStatusResponse:
    """A response without engines."""
    return pb.GetSpeculationStatusResponse(
        nodes=[
            pb.NodeStatus(address=one.address, alive=one.alive, cpus=one.cpus, gpus=one.gpus) for one in fleet.nodes
        ],
        deployments=[
            pb.DeploymentStatus(
                name=one.name, state=one.state, running=one.running, other=one.other, message=one.message
            )
            for one in fleet.deployments
        ],
        recent_errors=errors_to_proto(fleet.recent_errors),
    )


def fleet_from_proto(message: pb.GetSpeculationStatusResponse) -> FleetStatus:
    """Everything but the engines."""
    return FleetStatus(
        nodes=tuple(
            NodeStatus(address=one.address, alive=one.alive, cpus=one.cpus, gpus=one.gpus) for one in message.nodes
        ),
        deployments=tuple(
            DeploymentStatus(name=one.name, state=one.state, running=one.running, other=one.other, message=one.message)
            for one in message.deployments
        ),
        recent_errors=errors_from_proto(message.recent_errors),
    )
