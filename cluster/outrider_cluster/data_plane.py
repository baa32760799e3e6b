"""Values that pass between the actors of one deployment. Small, frozen, picklable."""

from dataclasses import dataclass, field

from outrider.core.fleet import PastError
from outrider.core.load import EngineLoad

__all__ = ["EngineIdentity", "Meeting", "RankPulse", "ReplicaView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Which engine, and which incarnation of it."""

    engine_id: str
    """Stable over rebuilds: the id of the target replica."""
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the ranks of one group meet."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPulse:
    """A rank's answer to a heartbeat."""

    load: EngineLoad = field(default_factory=EngineLoad)
    """Rank 0's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """A replica as the directory sees it."""

    replica_id: str
    address: str | None
    """Where its data plane serves; None: it does not."""
    epoch: int
    problem: str
    """Why it does not serve; empty when it does."""
    failures_in_a_row: int = 0
    """Failed incarnations since it last served for a while."""
    node: str = ""
    """Address of its node."""
    links: int = field(default=0, compare=False)
    """A draft's: targets linked to it."""
    sequences: int = field(default=0, compare=False)
    """A draft's: sequences open on it."""
    recent_errors: tuple[PastError, ...] = field(default=(), compare=False)
    """Why earlier incarnations failed, latest first. Ages change all the time, the replica does not."""

    @property
    def ready(self) -> bool:
        """Whether it serves."""
        return self.address is not None
