"""The front of one target replica: holds no model, watches the ranks, says where the engine serves."""

import asyncio
import contextlib
import logging
from functools import partial
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util.placement_group import PlacementGroup, get_current_placement_group

from outrider.core.errors import EngineUnavailable
from outrider.router.timing import LoopTime
from outrider.target.supervision import GroupPhase, GroupView, Supervisor
from outrider.telemetry.front_metrics import FrontMetrics
from outrider.telemetry.recent_errors import RecentErrors
from outrider_cluster.assembly import load_targets, supervision_policy
from outrider_cluster.data_plane import EngineIdentity, RankPulse, ReplicaView
from outrider_cluster.directory import ServeDirectory
from outrider_cluster.live import fixed_difference
from outrider_cluster.node import own_address
from outrider_cluster.observability import Role, configure_logs
from outrider_cluster.ray_group import RayRankGroup
from outrider_cluster.ray_metrics import RayMetricSink
from outrider_cluster.scaling import DEMAND
from outrider_cluster.settings import Settings, settings_of

__all__ = ["TargetFront"]

_log = logging.getLogger(__name__)

_FAILURES_BEFORE_UNHEALTHY = 5
"""Rebuilding here has not helped so often in a row: Serve may try another place. Between two of its
looks the group may serve for a moment; what it serves then is worth more than another place."""
_LOOK_AROUND_S = 1.0
"""How long a new replica looks for others. Before the very first replica of all Serve does not answer."""


class TargetFront:
    """A Serve replica in bundle 0 of its placement group; rank r runs in bundle r + 1."""

    def __init__(self, drafts: DeploymentHandle[Any] | None) -> None:
        """Starts nothing; `reconfigure` follows before the replica counts as running."""
        self._drafts = drafts
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._settings: Settings | None = None
        self._supervisor: Supervisor | None = None
        self._group: RayRankGroup | None = None
        self._sink = RayMetricSink()
        self._metrics: FrontMetrics | None = None
        self._pulse = RankPulse()
        self._epochs = 0
        self._errors = RecentErrors(LoopTime())
        self._changed = asyncio.Event()
        self._supervising: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take settings over. The ranks are rebuilt when anything changes that they were built from.

        The routers pass on what changes live, the drafts replace themselves. A replica that joins others
        which serve counts as running only when it serves too, or has failed: a rolling change must not
        end an engine for one that still loads.
        """
        settings = settings_of(user_config, origin="user_config")
        before, self._settings = self._settings, settings
        configure_logs(settings.telemetry, Role.FRONT, self._replica_id)
        if before is not None and fixed_difference(before, settings) is None:
            return
        await self._stop()
        labels = {"model_name": settings.model.public_name, "engine": self._replica_id}
        self._metrics = FrontMetrics(self._sink, labels)
        self._supervisor = Supervisor(
            self._make_group, supervision_policy(settings), LoopTime(), on_change=self._on_change
        )
        self._supervising = asyncio.create_task(self._supervisor.run(), name="supervisor")
        if self._drafts is not None:
            self._telling = asyncio.create_task(self._tell_drafts(self._drafts), name="draft-directory")
        if before is None and await self._others_serve():
            await self._started(settings.target.timeouts.start_s)

    async def describe(self) -> ReplicaView:
        """What the directory says about this replica."""
        view = self._view()
        return ReplicaView(
            replica_id=self._replica_id,
            address=view.address if view else None,
            epoch=view.epoch if view else 0,
            problem=view.problem if view else "the replica is starting",
            failures_in_a_row=view.failures_in_a_row if view else 0,
            node=own_address(),
            recent_errors=self._errors.latest_first(),
        )

    async def wait_for_change(self, known: ReplicaView | None, timeout_s: float) -> ReplicaView:
        """Return the view as soon as it differs from `known`, or after `timeout_s` as it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (view := await self.describe()) == known:
                    self._changed.clear()
                    await self._changed.wait()
                return view
        return await self.describe()

    async def check_health(self) -> None:
        """Raises when supervision itself has ended, or rebuilding in this place does not help."""
        if self._metrics is not None:
            # Serve asks every few seconds, whatever else happens.
            self._metrics.repeat()
        if self._supervising is not None and self._supervising.done():
            broken = None if self._supervising.cancelled() else self._supervising.exception()
            raise EngineUnavailable(f"the supervisor has ended: {broken!r}") from broken
        view = self._view()
        if view is not None and not view.ready and view.failures_in_a_row >= _FAILURES_BEFORE_UNHEALTHY:
            raise EngineUnavailable(f"{view.failures_in_a_row} failures in a row; the last one: {view.problem}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Demand for the autoscaling policy: replicas that the present work asks for."""
        if self._settings is None:
            return {}
        return {DEMAND: load_targets(self._settings.target).demand(self._pulse.load)}

    async def __del__(self) -> None:
        """Serve has taken this replica out and waits, for `graceful_shutdown_s` at most."""
        view = self._view()
        if self._group is not None and view is not None and view.ready:
            try:
                await self._group.drain()
            except EngineUnavailable as error:
                _log.warning("not drained: %s", error)
        await self._stop()

    async def _others_serve(self) -> bool:
        here = serve.get_replica_context()
        replicas: DeploymentHandle[Any] = serve.get_deployment_handle(here.deployment, here.app_name)
        directory = ServeDirectory(replicas, timeout_s=_LOOK_AROUND_S, clock=LoopTime())
        try:
            return any(one.replica_id != self._replica_id for one in await directory.endpoints())
        except TimeoutError:
            return False

    async def _started(self, timeout_s: float) -> None:
        """Return when the engine serves, has failed or has had its time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (view := await self.describe()).ready and not view.failures_in_a_row:
                    self._changed.clear()
                    await self._changed.wait()

    def _view(self) -> GroupView | None:
        return self._supervisor.view if self._supervisor is not None else None

    def _make_group(self, epoch: int) -> RayRankGroup:
        if self._settings is None:
            raise ValueError("no settings yet")
        placement_group = get_current_placement_group()
        if not isinstance(placement_group, PlacementGroup):
            raise ValueError("a target replica needs a placement group")
        # Over changes of the settings, too, an epoch stands for one incarnation.
        self._epochs += 1
        identity = EngineIdentity(engine_id=self._replica_id, epoch=self._epochs)
        self._group = RayRankGroup(self._settings, identity, placement_group, on_pulse=partial(setattr, self, "_pulse"))
        return self._group

    def _on_change(self, view: GroupView) -> None:
        fields = {"engine_id": self._replica_id, "engine_epoch": view.epoch, "reason": view.problem}
        _log.info("engine %s", view.phase.value, extra=fields)
        if view.phase is GroupPhase.FAILED:
            self._errors.add(view.problem)
        if self._metrics is not None:
            _publish(view.phase, self._metrics)
        self._pulse = RankPulse()
        self._changed.set()

    async def _tell_drafts(self, drafts: DeploymentHandle[Any]) -> None:
        """Keep rank 0 informed about the drafts; nothing here ever stops the engine."""
        if self._settings is None:
            return
        timeout_s, interval_s = self._settings.router.directory_timeout_s, self._settings.router.directory_interval_s
        directory = ServeDirectory(drafts, timeout_s=timeout_s, clock=LoopTime())
        while True:
            try:
                offers = await directory.draft_offers()
                view = self._view()
                if self._group is not None and view is not None and view.ready:
                    async with asyncio.timeout(timeout_s):
                        await self._group.set_drafts(offers)
            except TimeoutError:
                _log.warning("drafts: no answer within %g s", timeout_s)
            except EngineUnavailable as error:
                _log.warning("drafts: %s", error)
            except Exception:  # noqa: BLE001 - logged; a draft is never worth an engine
                _log.exception("drafts: the directory failed")
            await asyncio.sleep(interval_s)

    async def _stop(self) -> None:
        tasks = [task for task in (self._telling, self._supervising) if task is not None]
        self._telling = self._supervising = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _publish(phase: GroupPhase, metrics: FrontMetrics) -> None:
    calls = {
        GroupPhase.STARTING: metrics.starting,
        GroupPhase.READY: metrics.ready,
        GroupPhase.FAILED: metrics.failed,
        GroupPhase.CLOSED: metrics.closed,
    }
    calls[phase]()
