"""The router's service with the directory's knowledge added: engines that do not serve, and why."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from outrider.core.dispatch import EngineStatus
from outrider.core.generation import Caller, GenerationEvent, GenerationRequest, ModelDescription
from outrider.core.ports import GenerationService
from outrider_cluster.data_plane import ReplicaView

__all__ = ["DeploymentService", "merge_statuses"]


class DeploymentService:
    """Implements `GenerationService` over another one."""

    def __init__(self, inner: GenerationService, views: Callable[[], Sequence[ReplicaView]]) -> None:
        """`views`: what the directory found last; must not block."""
        self._inner = inner
        self._views = views

    def stream(self, request: GenerationRequest, caller: Caller) -> AsyncIterator[GenerationEvent]:
        """Run a request."""
        return self._inner.stream(request, caller)

    async def abort(self, request_id: str, caller: Caller) -> bool:
        """End a request of this caller."""
        return await self._inner.abort(request_id, caller)

    async def model_info(self, model: str) -> ModelDescription:
        """Describe the served model."""
        return await self._inner.model_info(model)

    async def speculation_status(self) -> Sequence[EngineStatus]:
        """The state of every engine, those included that no router is connected to."""
        return merge_statuses(await self._inner.speculation_status(), self._views())


def merge_statuses(statuses: Sequence[EngineStatus], views: Sequence[ReplicaView]) -> list[EngineStatus]:
    """Statuses by engine id, with what their fronts know: node, incarnations, failures, and why one does not serve."""
    merged = {status.engine_id: status for status in statuses}
    for view in views:
        known = merged.get(view.replica_id)
        if known is None and view.ready:
            continue  # a router that has not connected yet knows no load
        known = known or EngineStatus(engine_id=view.replica_id, ready=False)
        if not (known.ready or view.ready):
            known = replace(known, problem=view.problem)
        merged[view.replica_id] = replace(known, node=view.node, starts=view.epoch, recent_errors=view.recent_errors)
    return [merged[engine_id] for engine_id in sorted(merged)]
