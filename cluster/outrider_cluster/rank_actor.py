"""Ranks as Ray actors: the plain rank classes, each in a process of its own.

Async actors: methods may run at the same time, and none blocks the event loop. Two classes, so that
`ps` and Ray's dashboard tell rank 0 from the others.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.core.threads import share_interpreter
from outrider.target.draft_assignment import DraftOffer
from outrider_cluster.data_plane import EngineIdentity, Meeting, RankPulse
from outrider_cluster.node import own_address
from outrider_cluster.observability import Role, configure_logs
from outrider_cluster.peer_rank import PeerRank
from outrider_cluster.ray_metrics import RayMetricSink
from outrider_cluster.settings import Settings

if TYPE_CHECKING:
    from outrider_cluster.primary_rank import PrimaryRank

__all__ = ["PeerRankActor", "PrimaryRankActor"]


class PrimaryRankActor:
    """Rank 0."""

    def __init__(self, settings: Settings, identity: EngineIdentity) -> None:
        """Starts nothing that could fail: the front watches from here on."""
        _limit_threads(settings)
        configure_logs(settings.telemetry, Role.TARGET, f"{identity.engine_id} rank 0")
        share_interpreter()
        self._settings = settings
        self._identity = identity
        self._made: PrimaryRank | None = None

    def __repr__(self) -> str:
        """For Ray's dashboard and the prefix of its log lines."""
        return f"engine {self._identity.engine_id} rank 0"

    async def open_meeting(self) -> Meeting:
        """Listen for the other ranks."""
        return await self._rank().open_meeting()

    async def start(self, meeting: Meeting | None) -> str:
        """Start the engine; returns its address. `meeting` is what `open_meeting` has returned."""
        return await self._rank().start()

    async def ended(self) -> str:
        """Wait until this rank is unusable; returns why. The caller sees a dead process as an error."""
        return await self._rank().ended()

    async def ping(self) -> RankPulse:
        """Answer the front."""
        return self._rank().ping()

    async def set_drafts(self, offers: Sequence[DraftOffer]) -> None:
        """The drafts to choose from."""
        self._rank().set_drafts(offers)

    async def drain(self) -> None:
        """Finish what runs and take no more."""
        await self._rank().drain()

    async def leave(self, cause: str) -> None:
        """Tell the routers why the engine ends."""
        await self._rank().leave(cause)

    def _rank(self) -> "PrimaryRank":
        # Not in __init__, which Ray calls outside the event loop.
        if self._made is None:
            # Brings torch, which the front, who only creates this actor, does not need.
            from outrider_cluster.primary_rank import PrimaryRank

            host = self._settings.data_plane.host or own_address()
            self._made = PrimaryRank(self._settings, self._identity, host, sink=RayMetricSink())
        return self._made


class PeerRankActor:
    """Rank 1 or above."""

    def __init__(self, settings: Settings, identity: EngineIdentity, rank: int) -> None:
        """Starts nothing that could fail: the front watches from here on."""
        _limit_threads(settings)
        configure_logs(settings.telemetry, Role.TARGET, f"{identity.engine_id} rank {rank}")
        self._settings = settings
        self._identity = identity
        self._number = rank
        self._made: PeerRank | None = None

    def __repr__(self) -> str:
        """For Ray's dashboard and the prefix of its log lines."""
        return f"engine {self._identity.engine_id} rank {self._number}"

    async def start(self, meeting: Meeting | None) -> str:
        """Load the shard and follow rank 0; returns nothing."""
        await self._rank().start(meeting)
        return ""

    async def ended(self) -> str:
        """Wait until this rank is unusable; returns why. The caller sees a dead process as an error."""
        return await self._rank().ended()

    async def ping(self) -> RankPulse:
        """Answer the front."""
        return self._rank().ping()

    def _rank(self) -> PeerRank:
        if self._made is None:
            self._made = PeerRank(self._settings, self._number)
        return self._made


def _limit_threads(settings: Settings) -> None:
    # Read by the OpenMP runtime when torch is loaded, which happens when the rank starts.
    os.environ["OMP_NUM_THREADS"] = str(settings.target.threads_per_rank)
