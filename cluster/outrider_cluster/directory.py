"""Who serves where, asked of Serve: every replica of a deployment describes itself."""

import zlib
from collections.abc import Sequence
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from outrider.core.ports import Endpoint
from outrider_cluster.data_plane import ReplicaView

__all__ = ["ServeDirectory", "in_order_of_preference"]


class ServeDirectory:
    """Implements `Directory` over a handle whose deployment answers `describe` with a `ReplicaView`."""

    def __init__(self, handle: DeploymentHandle[Any], *, timeout_s: float) -> None:
        self._handle = handle
        self._timeout_s = timeout_s
        self._views: tuple[ReplicaView, ...] = ()

    @property
    def views(self) -> tuple[ReplicaView, ...]:
        """What the last successful question found, replicas that do not serve included."""
        return self._views

    async def endpoints(self) -> Sequence[Endpoint]:
        """The replicas that serve now. Raises `TimeoutError` when Serve or a replica does not answer."""
        await self.refresh()
        return [Endpoint(replica_id=one.replica_id, address=one.address) for one in self._views if one.address]

    async def refresh(self) -> tuple[ReplicaView, ...]:
        """Ask every replica. Raises `TimeoutError`; the last views stay then."""
        try:
            answers = await self._handle.broadcast("describe").results_async(
                timeout_s=self._timeout_s, return_exceptions=True
            )
        except DeploymentUnavailableError:
            answers = []
        # A replica that died meanwhile answers with an error; it is not there.
        self._views = tuple(one for one in answers if isinstance(one, ReplicaView))
        return self._views


def in_order_of_preference(endpoints: Sequence[Endpoint], engine_id: str) -> list[str]:
    """Addresses, each engine's own favourite first: targets spread evenly over drafts.

    Rendezvous hashing: when a draft comes or goes, only the engines that prefer it move.
    """

    def weight(endpoint: Endpoint) -> tuple[int, str]:
        return zlib.crc32(f"{engine_id} {endpoint.replica_id}".encode()), endpoint.replica_id

    return [one.address for one in sorted(endpoints, key=weight, reverse=True)]
