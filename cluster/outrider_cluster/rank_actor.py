"""One rank as a Ray actor: the plain rank classes, in a process of their own."""

import os
from collections.abc import Sequence

from outrider_cluster.data_plane import EngineIdentity, Meeting, RankPulse
from outrider_cluster.node import own_address
from outrider_cluster.peer_rank import PeerRank
from outrider_cluster.primary_rank import PrimaryRank
from outrider_cluster.settings import Settings

__all__ = ["RankActor"]


class RankActor:
    """An async actor. Its methods may run at the same time; none blocks the event loop."""

    def __init__(self, settings: Settings, identity: EngineIdentity, rank: int) -> None:
        """Starts nothing that could fail: the front watches from here on."""
        # Read by the OpenMP runtime when torch is loaded, which happens in `start`.
        os.environ["OMP_NUM_THREADS"] = str(settings.target.threads_per_rank)
        self._settings = settings
        self._identity = identity
        self._rank = rank
        self._made: PrimaryRank | PeerRank | None = None

    async def open_meeting(self) -> Meeting:
        """Rank 0: listen for the others."""
        return await self._primary().open_meeting()

    async def start(self, meeting: Meeting | None) -> str:
        """Start this rank; returns the engine's address from rank 0, nothing from the others."""
        part = self._part()
        if isinstance(part, PrimaryRank):
            return await part.start()
        await part.start(meeting)
        return ""

    async def ended(self) -> str:
        """Wait until this rank is unusable; returns why. The caller sees a dead process as an error."""
        return await self._part().ended()

    async def ping(self) -> RankPulse:
        """Answer the front."""
        return self._part().ping()

    async def set_drafts(self, addresses: Sequence[str]) -> None:
        """Rank 0: the drafts to choose from."""
        self._primary().set_drafts(addresses)

    async def leave(self, cause: str) -> None:
        """Rank 0: tell the routers why the engine ends."""
        await self._primary().leave(cause)

    def _part(self) -> PrimaryRank | PeerRank:
        # Not in __init__, which Ray calls outside the event loop.
        if self._made is None:
            if self._rank == 0:
                host = self._settings.data_plane.host or own_address()
                self._made = PrimaryRank(self._settings, self._identity, host)
            else:
                self._made = PeerRank(self._settings, self._rank)
        return self._made

    def _primary(self) -> PrimaryRank:
        part = self._part()
        if not isinstance(part, PrimaryRank):
            raise TypeError(f"rank {self._rank} is no primary")
        return part
