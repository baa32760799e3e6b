"""Supervision: which events end a group, what is said about it, and how it comes back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from outrider.core.errors import ConfigError
from outrider.target.supervision import GroupPhase, GroupState, GroupView, SupervisionPolicy, Supervisor

pytestmark = pytest.mark.timeout(30)


class ManualClock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


POLICY = SupervisionPolicy(backoff_s=1.0, backoff_max_s=5.0)


class TestGroupState:
    def test_before_the_first_start_there_is_no_epoch(self) -> None:
        view = GroupState(POLICY, ManualClock()).view
        assert (view.epoch, view.ready, view.address) == (0, False, None)

    def test_a_life(self) -> None:
        state = GroupState(POLICY, ManualClock())
        assert state.start() == 1
        assert state.view.problem == "engine is starting (epoch 1)"
        state.serving("h:1")
        assert state.view == GroupView(phase=GroupPhase.READY, epoch=1, address="h:1", problem="")
        state.fail("rank 1: died")
        assert state.view == GroupView(
            phase=GroupPhase.FAILED, epoch=1, address=None, problem="rank 1: died", failures_in_a_row=1
        )
        assert state.start() == 2
        assert state.view.problem == "engine is starting (epoch 2), after: rank 1: died"

    def test_the_first_rebuild_is_at_once_and_repeated_ones_back_off(self) -> None:
        state = GroupState(POLICY, ManualClock())
        waits = []
        for _ in range(6):
            waits.append(state.backoff_s)
            state.start()
            state.fail("rank 0: died")
        assert waits == [0.0, 0.0, 1.0, 2.0, 4.0, 5.0]

    def test_thousands_of_failures_still_give_a_number(self) -> None:
        state = GroupState(POLICY, ManualClock())
        for _ in range(3000):
            state.start()
            state.fail("rank 0: died")
        assert state.backoff_s == 5.0

    @pytest.mark.parametrize(("ready_for", "failures"), [(4.9, 3), (5.0, 1)])
    def test_a_long_ready_group_clears_the_record(self, ready_for: float, failures: int) -> None:
        clock = ManualClock()
        state = GroupState(POLICY, clock)
        for _ in range(2):
            state.start()
            state.fail("rank 0: died")
        state.start()
        state.serving("h:1")
        clock.time += ready_for
        # The view tells it while the group still serves.
        assert state.view.failures_in_a_row == (2 if failures > 1 else 0)
        state.fail("rank 0: died")
        assert state.view.failures_in_a_row == failures

    def test_a_long_start_does_not_clear_the_record(self) -> None:
        clock = ManualClock()
        state = GroupState(POLICY, clock)
        for _ in range(3):
            state.start()
            clock.time += 100
            state.fail("rank 0: died")
        assert state.failures_in_a_row == 3

    def test_wrong_transitions_are_refused(self) -> None:
        state = GroupState(POLICY, ManualClock())
        with pytest.raises(ValueError, match="failed group"):
            state.serving("h:1")
        with pytest.raises(ValueError, match="failed group"):
            state.fail("x")
        state.start()
        with pytest.raises(ValueError, match="starting group"):
            state.start()
        state.close()
        with pytest.raises(ValueError, match="closed group"):
            state.start()

    @pytest.mark.parametrize("field", ["start_s", "heartbeat_s", "backoff_s"])
    @pytest.mark.parametrize("value", [0.0, -1.0])
    def test_time_limits_are_positive(self, field: str, value: float) -> None:
        with pytest.raises(ConfigError, match=field):
            SupervisionPolicy(**{field: value})


class FakeGroup:
    """Starts at once, lives until a test ends one of its ranks."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.num_ranks = 2
        self.closed = False
        self.cause = ""
        self.may_start = asyncio.Event()
        self.start_error: Exception | None = None
        self.deaths: list[asyncio.Future[str]] = [asyncio.get_running_loop().create_future() for _ in range(2)]
        self.hung = [False, False]
        self.ping_error: Exception | None = None

    async def start(self) -> str:
        await self.may_start.wait()
        if self.start_error is not None:
            raise self.start_error
        return f"h:{self.epoch}"

    async def ended(self, rank: int) -> str:
        return await asyncio.shield(self.deaths[rank])

    async def ping(self, rank: int) -> None:
        if self.ping_error is not None:
            raise self.ping_error
        if self.hung[rank]:
            await asyncio.Event().wait()

    async def close(self, cause: str) -> None:
        self.closed = True
        self.cause = cause


class Rig:
    """A running supervisor, its groups, and the views that it reported."""

    def __init__(self, policy: SupervisionPolicy) -> None:
        self.groups: list[FakeGroup] = []
        self.views: list[GroupView] = []
        self.changed = asyncio.Condition()
        self.prepare: Callable[[FakeGroup], None] = lambda group: group.may_start.set()
        self.supervisor = Supervisor(self.make, policy, ManualClock(), on_change=self.note)
        self.pending: set[asyncio.Task[None]] = set()

    def make(self, epoch: int) -> FakeGroup:
        group = FakeGroup(epoch)
        self.prepare(group)
        self.groups.append(group)
        return group

    def note(self, view: GroupView) -> None:
        self.views.append(view)
        task = asyncio.ensure_future(self.wake())
        self.pending.add(task)
        task.add_done_callback(self.pending.discard)

    async def wake(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, phase: GroupPhase, epoch: int) -> GroupView:
        def seen() -> bool:
            return any(view.phase is phase and view.epoch == epoch for view in self.views)

        async with self.changed:
            await self.changed.wait_for(seen)
        return next(view for view in self.views if view.phase is phase and view.epoch == epoch)


@asynccontextmanager
async def running(policy: SupervisionPolicy | None = None) -> AsyncIterator[Rig]:
    rig = Rig(policy or SupervisionPolicy(backoff_s=0.001, backoff_max_s=0.002, heartbeat_interval_s=0.001))
    task = asyncio.ensure_future(rig.supervisor.run())
    try:
        yield rig
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class TestSupervisor:
    async def test_a_dead_rank_ends_the_group_and_a_new_one_follows(self) -> None:
        async with running() as rig:
            await rig.until(GroupPhase.READY, 1)
            rig.groups[0].deaths[1].set_result("process died")
            failed = await rig.until(GroupPhase.FAILED, 1)
            ready = await rig.until(GroupPhase.READY, 2)
            assert failed.problem == "rank 1: process died"
            assert (ready.address, ready.epoch) == ("h:2", 2)
            assert [group.closed for group in rig.groups] == [True, False]
            assert rig.groups[0].cause == "rank 1: process died"

    async def test_the_old_group_is_gone_before_the_new_one_is_made(self) -> None:
        async with running() as rig:
            await rig.until(GroupPhase.READY, 1)
            closed_at_birth: list[bool] = []

            def prepare(group: FakeGroup) -> None:
                closed_at_birth.append(rig.groups[0].closed)
                group.may_start.set()

            rig.prepare = prepare
            rig.groups[0].deaths[0].set_result("process died")
            await rig.until(GroupPhase.READY, 2)
            assert closed_at_birth == [True]

    async def test_a_hung_rank_is_found_and_named(self) -> None:
        policy = SupervisionPolicy(heartbeat_s=0.01, heartbeat_interval_s=0.001, backoff_s=0.001, backoff_max_s=0.002)
        async with running(policy) as rig:
            await rig.until(GroupPhase.READY, 1)
            rig.groups[0].hung[1] = True
            assert (await rig.until(GroupPhase.FAILED, 1)).problem == "rank 1: no answer for 0.01 s"
            await rig.until(GroupPhase.READY, 2)

    async def test_an_error_in_a_heartbeat_is_the_cause(self) -> None:
        async with running() as rig:
            await rig.until(GroupPhase.READY, 1)
            rig.groups[0].ping_error = RuntimeError("engine loop has stopped")
            failed = await rig.until(GroupPhase.FAILED, 1)
            assert failed.problem in ("rank 0: engine loop has stopped", "rank 1: engine loop has stopped")

    async def test_a_death_during_the_start_is_the_cause(self) -> None:
        async with running() as rig:
            rig.prepare = lambda group: None
            await rig.until(GroupPhase.STARTING, 1)
            rig.groups[0].deaths[0].set_result("out of memory")
            assert (await rig.until(GroupPhase.FAILED, 1)).problem == "rank 0: out of memory"
            assert rig.groups[0].closed

    async def test_a_failed_start_is_tried_again(self) -> None:
        async with running() as rig:

            def prepare(group: FakeGroup) -> None:
                group.start_error = RuntimeError("no such folder") if group.epoch == 1 else None
                group.may_start.set()

            rig.prepare = prepare
            assert (await rig.until(GroupPhase.FAILED, 1)).problem == "start failed: no such folder"
            await rig.until(GroupPhase.READY, 2)

    async def test_groups_that_serve_and_die_at_once_fail_in_a_row(self) -> None:
        def ready_then_dead(group: FakeGroup) -> None:
            group.may_start.set()
            group.ping_error = RuntimeError("out of memory")

        async with running() as rig:
            rig.prepare = ready_then_dead
            await rig.until(GroupPhase.READY, 3)
            failed = await rig.until(GroupPhase.FAILED, 3)
            assert failed.failures_in_a_row == 3

    async def test_a_start_without_end_is_given_up(self) -> None:
        async with running(SupervisionPolicy(start_s=0.01, backoff_s=0.001, backoff_max_s=0.002)) as rig:
            rig.prepare = lambda group: None
            failed = await rig.until(GroupPhase.FAILED, 1)
            assert failed.problem == "the ranks did not start within 0.01 s"
            await rig.until(GroupPhase.STARTING, 2)

    async def test_the_end_closes_the_group(self) -> None:
        async with running() as rig:
            await rig.until(GroupPhase.READY, 1)
        assert rig.groups[0].cause == "the replica is shutting down"
        assert rig.supervisor.view.phase is GroupPhase.CLOSED
        assert rig.views[-1].problem == "the replica is shutting down"
