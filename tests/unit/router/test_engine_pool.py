"""Links to engines: connecting, losing, coming back, following the directory."""

import asyncio

import pytest
from tests.unit.router.fakes import FakeDirectory, FakeEngine, ManualTime, World, overloaded, settle

from outrider.core.dispatch import EngineStatus, ReportRequest
from outrider.core.errors import ConfigError, EngineUnavailable
from outrider.core.policy import GateSettings
from outrider.core.ports import Endpoint
from outrider.router.engine_link import LinkSettings
from outrider.router.engine_pool import EnginePool

SETTINGS = LinkSettings(report_interval_s=1.0, stale_after_s=3.0, backoff_first_s=1.0, backoff_max_s=8.0)


def reports_asked(world: World) -> int:
    return sum(isinstance(one, ReportRequest) for one in world.engine.session.sent)


async def test_gate_settings_and_a_report_request_go_out_on_connect() -> None:
    async with World() as world:
        assert world.engine.session.gates == [GateSettings()]
        assert reports_asked(world) == 1


async def test_changed_gate_settings_reach_every_engine_and_every_later_session() -> None:
    async with World("e0", "e1", link_settings=SETTINGS) as world:
        changed = GateSettings(max_num_draft_tokens=2)
        world.pool.set_gate(changed)
        assert [one.session.gates[-1] for one in world.engines.values()] == [changed, changed]
        world.engine.session.lose("gone")
        await settle()
        await world.time.advance(1.0)
        assert len(world.engine.sessions) == 2
        assert world.engine.session.gates == [changed]


async def test_reports_are_asked_for_again_and_again() -> None:
    async with World(link_settings=SETTINGS) as world:
        world.engine.status = EngineStatus(engine_id="e0", ready=True, running=5, waiting=2)
        await world.time.advance(2.0)
        assert reports_asked(world) == 3
        assert world.pool.loads()[0].reported == 7
        assert world.pool.statuses() == [world.engine.status]


async def test_overdue_report_is_flagged() -> None:
    async with World(link_settings=SETTINGS) as world:
        world.engine.reports = False
        await world.time.advance(3.0)
        assert not world.pool.loads()[0].stale
        await world.time.advance(1.0)
        assert world.pool.loads()[0].stale
        (status,) = world.pool.statuses()
        assert status.ready
        assert status.problem == "no report for 4.0 s"


async def test_engine_that_never_reported_becomes_stale_too() -> None:
    world = World(link_settings=SETTINGS)
    world.engine.reports = False
    async with world:
        assert not world.pool.loads()[0].stale
        await world.time.advance(3.5)
        assert world.pool.loads()[0].stale


async def test_engine_that_is_being_rebuilt_says_so_and_gets_nothing() -> None:
    async with World(link_settings=SETTINGS) as world:
        world.engine.status = EngineStatus(engine_id="e0", ready=False, problem="rebuilding: rank 1 died")
        await world.time.advance(1.0)
        assert world.pool.statuses() == [world.engine.status]
        with pytest.raises(EngineUnavailable, match="e0: rebuilding: rank 1 died"):
            await world.open().done()


async def test_unreachable_engine_is_tried_again_with_growing_pauses() -> None:
    world = World(link_settings=SETTINGS)
    world.engine.unreachable = EngineUnavailable("connection refused")
    async with world:
        (status,) = world.pool.statuses()
        assert (status.ready, status.problem) == (False, "connection refused")
        attempts_s = []
        for _ in range(120):
            before = world.engine.attempts
            await world.time.advance(0.125)
            if world.engine.attempts > before:
                attempts_s.append(world.time.now())
        assert attempts_s == [0.5, 1.5, 3.5, 7.5, 11.5]  # half of 1, 2, 4, 8, 8 without jitter
        world.engine.unreachable = None
        await world.time.advance(4.0)
        assert world.pool.loads()[0].ready


async def test_session_that_breaks_at_once_counts_as_a_failed_attempt() -> None:
    world = World(link_settings=SETTINGS)
    world.engine.reports = False
    async with world:
        for pause_s in (0.5, 1.0, 2.0):
            world.engine.session.emit(world.engine.session.hello)
            world.engine.session.lose("crash loop")
            await settle()
            before = world.engine.attempts
            await world.time.advance(pause_s - 0.01)
            assert world.engine.attempts == before
            await world.time.advance(0.01)
            assert world.engine.attempts == before + 1


async def test_lost_engine_keeps_its_name_and_says_why() -> None:
    async with World(link_settings=SETTINGS) as world:
        session = world.engine.session
        session.lose("stream reset by peer")
        await settle()
        assert session.closed
        (status,) = world.pool.statuses()
        assert (status.engine_id, status.ready, status.problem) == ("e0", False, "stream reset by peer")
        await world.time.advance(0.5)
        assert world.pool.loads()[0].ready
        assert world.pool.statuses() == [world.engine.status]


async def test_closed_session_is_a_lost_engine() -> None:
    async with World(link_settings=SETTINGS) as world:
        world.engine.session.emit()
        await settle()
        assert world.pool.statuses()[0].problem == "the session was closed"


async def test_engine_of_another_model_is_refused() -> None:
    world = World()
    world.engine.model = "other"
    async with world:
        assert world.pool.statuses()[0].problem == "serves 'other', but this router serves 'toy'"
        assert world.engine.session.closed


async def test_engine_that_can_hold_no_text_is_refused() -> None:
    world = World()
    world.engine.kv_capacity_tokens = 0
    async with world:
        assert world.pool.statuses()[0].problem == "holds texts of 0 tokens, of at most 1024"


async def test_shortest_engine_limits_the_text() -> None:
    world = World("e0", "e1", "e2")
    world.engines["e1"].kv_capacity_tokens = 100
    world.engines["e2"].unreachable = EngineUnavailable("no")
    async with world:
        assert world.pool.max_text_len(1024) == 100
        assert world.pool.max_text_len(50) == 50


async def test_unexpected_error_of_a_session_factory_is_a_problem_not_a_crash() -> None:
    world = World(link_settings=SETTINGS)
    world.engine.unreachable = ZeroDivisionError("bug")
    async with world:
        assert world.pool.statuses()[0].problem == "ZeroDivisionError: bug"
        world.engine.unreachable = None
        await world.time.advance(0.5)
        assert world.pool.loads()[0].ready


async def test_connect_that_hangs_is_given_up() -> None:
    async def hang(endpoint: Endpoint) -> FakeEngine:
        await asyncio.Event().wait()
        raise AssertionError(endpoint)

    pool = EnginePool(
        directory=FakeDirectory(["e0"]),
        connect=hang,  # type: ignore[arg-type]
        model="toy",
        time=ManualTime(),
        settings=LinkSettings(connect_timeout_s=0.001),
    )
    await pool.start()
    assert pool.statuses()[0].problem == "no answer from e0:1 within 0.001 s"
    await pool.close()


async def test_new_engine_is_found_at_the_next_refresh() -> None:
    async with World("e0", "e1") as world:
        world.directory.listed = world.directory.listed[:1]
        await world.pool.refresh()
        assert [one.replica_id for one in world.pool.loads()] == ["e0"]
        world.directory.listed.append(Endpoint(replica_id="e1", address="e1:1"))
        await world.time.advance(2.0)
        assert [one.ready for one in world.pool.loads()] == [True, True]


@pytest.mark.parametrize("failure", [TimeoutError(), RuntimeError("control plane is confused")])
async def test_directory_that_does_not_answer_changes_nothing(failure: Exception) -> None:
    async with World() as world:
        world.directory.failure = failure
        await world.time.advance(10.0)
        assert world.pool.loads()[0].ready
        assert len(world.engine.sessions) == 1
        world.directory.failure = None
        world.directory.listed = []
        await world.time.advance(2.0)
        assert world.pool.loads() == []


async def test_engine_that_leaves_the_directory_finishes_its_work_first() -> None:
    async with World() as world:
        client = world.open()
        submit = await world.engine.submits.get()
        world.directory.listed = []
        await world.time.advance(2.0)
        assert world.pool.loads()[0].leaving
        world.engine.text(submit, "done")
        assert (await client.done()).text() == "done"
        await world.time.advance(2.0)
        assert world.pool.loads() == []
        assert world.engine.session.closed


async def test_engine_that_moved_gets_a_new_session() -> None:
    async with World() as world:
        client = world.open()
        await world.engine.submits.get()
        world.directory.listed = [Endpoint(replica_id="e0", address="elsewhere:1")]
        await world.time.advance(2.0)
        world.engine.text(await world.engine.submits.get(), "fine")
        assert (await client.done()).text() == "fine"
        assert len(world.engine.sessions) == 2
        assert world.engine.sessions[0].closed


async def test_full_queue_delays_control_commands_but_loses_none() -> None:
    async with World(link_settings=SETTINGS) as world:
        world.engine.refusal = overloaded()
        changed = GateSettings(max_num_draft_tokens=1)
        world.pool.set_gate(changed)
        await world.time.advance(2.0)
        asked = reports_asked(world)
        world.engine.refusal = None
        await world.time.advance(1.0)
        assert world.engine.session.gates[-1] == changed
        assert reports_asked(world) == asked + 1  # one report answers all


async def test_close_leaves_no_task_and_no_alarm() -> None:
    async with World("e0", "e1") as world:
        pass
    assert world.time.pending == []
    assert all(one.session.closed for one in world.engines.values())
    assert [one for one in asyncio.all_tasks() if one is not asyncio.current_task()] == []
    await world.pool.close()


@pytest.mark.parametrize("name", ["connect_timeout_s", "report_interval_s", "stale_after_s", "backoff_first_s"])
def test_times_that_cannot_work_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        LinkSettings(**{name: 0.0})


def test_refresh_interval_is_above_zero() -> None:
    world = World()
    with pytest.raises(ConfigError, match="refresh_interval_s"):
        EnginePool(
            directory=world.directory,
            connect=world.connect,
            model="toy",
            time=world.time,
            refresh_interval_s=0.0,
        )
