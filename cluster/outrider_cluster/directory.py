"""Who serves where, asked of Serve: every replica of a deployment describes itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from outrider.core.ports import Clock, Endpoint
from outrider.target.draft_assignment import DraftOffer
from outrider_cluster.data_plane import ReplicaView

__all__ = ["ServeDirectory"]


_FORGET_AFTER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    view: ReplicaView
    at_s: float


class ServeDirectory:
    """Implements `Directory` over a handle whose deployment answers `describe` with a `ReplicaView`.

    Serve hides a replica while it reconfigures it, and all replicas of a small deployment at once. A
    replica is therefore forgotten only when it has been missing for a while; whoever talks to a
    dead one notices by itself.
    """

    def __init__(self, handle: DeploymentHandle[Any], *, timeout_s: float, clock: Clock) -> None:
        self._handle = handle
        self._timeout_s = timeout_s
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._looked_at_s = clock.now()

    @property
    def views(self) -> tuple[ReplicaView, ...]:
        """The replicas known, those that do not serve included."""
        return tuple(one.view for one in self._seen.values())

    async def endpoints(self) -> Sequence[Endpoint]:
        """The replicas that serve now. Raises `TimeoutError` when Serve or a replica does not answer."""
        await self._refresh()
        return [Endpoint(replica_id=one.replica_id, address=one.address) for one in self.views if one.address]

    async def draft_offers(self) -> Sequence[DraftOffer]:
        """The drafts that serve now, with their load. Raises as `endpoints` does."""
        await self._refresh()
        return [
            DraftOffer(
                replica_id=one.view.replica_id,
                address=one.view.address,
                links=one.view.links,
                sequences=one.view.sequences,
                fresh=one.at_s == self._looked_at_s,
            )
            for one in self._seen.values()
            if one.view.address
        ]

    async def _refresh(self) -> None:
        try:
            answers = await self._handle.broadcast("describe").results_async(
                timeout_s=self._timeout_s, return_exceptions=True
            )
        except DeploymentUnavailableError:
            answers = []
        now = self._looked_at_s = self._clock.now()
        kept = {key: one for key, one in self._seen.items() if now - one.at_s < _FORGET_AFTER_S}
        # A replica that died meanwhile answers with an error.
        answered = {one.replica_id: _Seen(view=one, at_s=now) for one in answers if isinstance(one, ReplicaView)}
        self._seen = kept | answered
