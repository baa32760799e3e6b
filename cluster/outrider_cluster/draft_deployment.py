"""A draft replica as a Serve deployment. Its loss costs speed, nothing else."""

import asyncio
import logging
import os
import secrets
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace import TracerProvider
from ray import serve

from outrider.core.errors import EngineUnavailable
from outrider.telemetry.draft_metrics import DraftMetrics, DraftReport
from outrider_cluster.assembly import draft_model_name
from outrider_cluster.data_plane import ReplicaView
from outrider_cluster.node import own_address
from outrider_cluster.observability import Role, configure_logs, draft_tracer, provider_for
from outrider_cluster.ray_metrics import RayMetricSink
from outrider_cluster.sections import DraftSettings
from outrider_cluster.settings import Settings, settings_of

if TYPE_CHECKING:
    from outrider_cluster.draft_runtime import DraftRuntime

__all__ = ["DraftReplica"]

_log = logging.getLogger(__name__)

_PUBLISH_INTERVAL_S = 1.0


class DraftReplica:
    """A Serve replica. Loads in the background, so that the service is ready without it."""

    def __init__(self) -> None:
        """Starts nothing; `reconfigure` follows before the replica counts as running."""
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._incarnation = 0
        self._settings: Settings | None = None
        self._runtime: DraftRuntime | None = None
        self._starting: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._sink = RayMetricSink()
        self._provider: TracerProvider | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """The first settings start the draft; a change of what it was built from starts it anew.

        The old one drains at once, and targets decode plainly until the new one serves.
        """
        settings = settings_of(user_config, origin="user_config")
        draft = settings.active_draft
        if draft is None:
            raise ValueError("draft: is not enabled")
        before, self._settings = self._settings, settings
        configure_logs(settings.telemetry, Role.DRAFT, self._replica_id)
        if before is not None and (before.model, before.draft) == (settings.model, settings.draft):
            return
        await self._stop("the draft is being replaced")
        # Targets must not take it for the one that they knew.
        self._incarnation = secrets.randbits(62) + 1
        # Read by the OpenMP runtime when torch is loaded, which happens in the start.
        os.environ["OMP_NUM_THREADS"] = str(draft.threads)
        self._starting = asyncio.create_task(self._start(settings, draft), name="draft-start")
        labels = {"model_name": draft_model_name(settings, draft), "replica": self._replica_id}
        self._publishing = asyncio.create_task(self._publish(DraftMetrics(self._sink, labels)), name="draft-metrics")

    async def describe(self) -> ReplicaView:
        """What the directory says about this replica."""
        runtime = self._runtime
        return ReplicaView(
            replica_id=self._replica_id,
            address=runtime.address if runtime is not None else None,
            epoch=self._incarnation,
            problem="" if runtime is not None else "the draft is loading",
            links=runtime.links if runtime is not None else 0,
            sequences=runtime.sequences if runtime is not None else 0,
        )

    async def check_health(self) -> None:
        """Raises when the start or the drafting thread has failed: Serve replaces the replica then."""
        if self._starting is not None and self._starting.done():
            self._starting.result()
        if self._runtime is not None and self._runtime.failure is not None:
            raise EngineUnavailable(f"the draft failed: {self._runtime.failure}")

    async def __del__(self) -> None:
        await self._stop("the draft is shutting down")
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown)

    async def _start(self, settings: Settings, draft: DraftSettings) -> None:
        # Brings torch, which whoever only deploys this class does not need.
        from outrider_cluster.draft_runtime import start_draft

        host = settings.data_plane.host or own_address()
        if self._provider is None:
            self._provider = provider_for(settings.telemetry, Role.DRAFT, self._replica_id)
        spans = draft_tracer(self._provider, settings.telemetry)
        self._runtime = await start_draft(settings, draft, incarnation=self._incarnation, host=host, spans=spans)
        _log.info("draft %s serves at %s", self._replica_id, self._runtime.address)

    async def _publish(self, metrics: DraftMetrics) -> None:
        while True:
            metrics.publish(self._runtime.report() if self._runtime is not None else DraftReport())
            await asyncio.sleep(_PUBLISH_INTERVAL_S)

    async def _stop(self, reason: str) -> None:
        tasks = [task for task in (self._starting, self._publishing) if task is not None]
        self._starting = self._publishing = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            await runtime.stop(reason)
