"""One incarnation of an engine as Ray actors: implements `EngineGroup` for the supervisor."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.core.errors import EngineUnavailable, OutriderError
from outrider.target.draft_assignment import DraftOffer
from outrider_cluster.data_plane import EngineIdentity, RankPulse
from outrider_cluster.rank_actor import PeerRankActor, PrimaryRankActor
from outrider_cluster.sections import EngineKind
from outrider_cluster.settings import Settings

__all__ = ["RayRankGroup", "reason_of"]

_LEAVE_TIMEOUT_S = 3.0


class RayRankGroup:
    """Creates every rank actor at once, each in its own bundle, and kills them all at the end."""

    def __init__(
        self,
        settings: Settings,
        identity: EngineIdentity,
        placement_group: PlacementGroup,
        *,
        on_pulse: Callable[[RankPulse], None],
    ) -> None:
        """`on_pulse` is told rank 0's answers to heartbeats."""
        # The scripted engine has no shards: its ranks have nothing to meet for.
        self._meets = settings.target.tensor_parallel_size > 1 and settings.engine is EngineKind.TORCH
        self._on_pulse = on_pulse
        self._ranks: list[Any] = [
            _actor_class(rank, settings, identity, placement_group).remote(
                settings, identity, *(() if rank == 0 else (rank,))
            )
            for rank in range(settings.target.tensor_parallel_size)
        ]

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return len(self._ranks)

    async def start(self) -> str:
        """Start every rank; returns rank 0's address. Raises `EngineUnavailable` naming the rank."""
        meeting = await self._call(0, "open_meeting") if self._meets else None
        starts = [self._call(rank, "start", meeting) for rank in range(self.num_ranks)]
        address: str = (await asyncio.gather(*starts))[0]
        return address

    async def ended(self, rank: int) -> str:
        """Wait for the end of a rank; a call that stays open sees the death of a process at once."""
        try:
            cause: str = await self._ranks[rank].ended.remote()
        except RayActorError as error:
            return reason_of(error)
        return cause

    async def ping(self, rank: int) -> None:
        """One heartbeat. Raises what stops the rank from answering."""
        try:
            pulse: RankPulse = await self._ranks[rank].ping.remote()
        except (RayActorError, RayTaskError) as error:
            raise EngineUnavailable(reason_of(error)) from error
        if rank == 0:
            self._on_pulse(pulse)

    async def set_drafts(self, offers: Sequence[DraftOffer]) -> None:
        """Tell rank 0 which drafts there are, and how loaded."""
        await self._call(0, "set_drafts", list(offers))

    async def drain(self) -> None:
        """Return when rank 0 has finished its sequences and takes no more. Raises `EngineUnavailable`."""
        await self._call(0, "drain")

    async def close(self, cause: str) -> None:
        """Let rank 0 tell the routers, then kill every actor."""
        try:
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                await self._call(0, "leave", cause)
        except (TimeoutError, EngineUnavailable):
            # Rank 0 is gone or hung: the routers see their streams break.
            pass
        finally:
            for rank in self._ranks:
                ray.kill(rank)

    async def _call(self, rank: int, method: str, *args: object) -> Any:
        try:
            return await getattr(self._ranks[rank], method).remote(*args)
        except (RayActorError, RayTaskError) as error:
            raise EngineUnavailable(f"rank {rank}: {reason_of(error)}") from error


def _actor_class(rank: int, settings: Settings, identity: EngineIdentity, placement_group: PlacementGroup) -> Any:
    actor_class: Any = ray.remote(PrimaryRankActor if rank == 0 else PeerRankActor)
    return actor_class.options(
        # What Ray's dashboard shows, and unique: an incarnation never comes back.
        name=f"engine {identity.engine_id} epoch {identity.epoch} rank {rank}",
        num_cpus=settings.target.cpus_per_rank,
        num_gpus=settings.target.gpus_per_rank,
        # Restarting one rank would leave it outside the communicator.
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=placement_group, placement_group_bundle_index=rank + 1
        ),
    )


def reason_of(error: Exception) -> str:
    """One line about what Ray reports in many."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, EngineUnavailable):
        return cause.cause
    if isinstance(cause, OutriderError):
        return str(cause)
    if isinstance(cause, RayActorError):
        details = str(cause).partition("Worker exit type: ")[2].split(maxsplit=1)
        return f"its process has died ({details[0]})" if details else "its process has died"
    return f"{type(cause).__name__}: {cause}"
