"""What an operator sees beside the engines: nodes, deployments and what went wrong lately."""

from dataclasses import dataclass

__all__ = ["DeploymentStatus", "FleetStatus", "NodeStatus", "PastError"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastError:
    """Something that went wrong and may be over. An age, not a time: clocks differ."""

    text: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One machine of the cluster."""

    address: str
    alive: bool
    cpus: float = 0.0
    gpus: float = 0.0
    """What the cluster may hand out there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentStatus:
    """One kind of replica."""

    name: str
    state: str
    """In the control plane's words."""
    running: int = 0
    other: int = 0
    """Replicas that start, stop or are being replaced."""
    message: str = ""
    """Why it is not well; may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """What the control plane knows; empty where it does not answer."""

    nodes: tuple[NodeStatus, ...] = ()
    deployments: tuple[DeploymentStatus, ...] = ()
    recent_errors: tuple[PastError, ...] = ()
    """Of the router that answered, latest first."""
