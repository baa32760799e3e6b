"""Who serves, with what load, and what is said about engines that do not serve."""

from dataclasses import replace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from outrider.core.dispatch import EngineStatus
from outrider.core.fleet import PastError
from outrider.target.draft_assignment import DraftOffer
from outrider_cluster.data_plane import ReplicaView
from outrider_cluster.deployment_service import merge_statuses
from outrider_cluster.directory import ServeDirectory


def view(replica_id: str, *, address: str | None = None, problem: str = "") -> ReplicaView:
    return ReplicaView(replica_id=replica_id, address=address, epoch=1, problem=problem)


def test_an_engine_that_no_router_knows_is_listed_with_its_problem() -> None:
    merged = merge_statuses([], [view("e", problem="rank 1: died")])
    assert [(one.engine_id, one.ready, one.problem) for one in merged] == [("e", False, "rank 1: died")]


def test_the_fronts_word_replaces_a_routers_guess() -> None:
    lost = EngineStatus(engine_id="e", ready=False, problem="stream lost")
    assert merge_statuses([lost], [view("e", problem="rank 1: died")])[0].problem == "rank 1: died"


def test_a_serving_engine_keeps_its_own_words_and_gets_what_its_front_knows() -> None:
    well = EngineStatus(engine_id="e", ready=True, running=3)
    assert merge_statuses([well], [view("e", address="h:1")]) == [replace(well, starts=1)]
    # The router is connected: its view is newer than the directory's.
    assert merge_statuses([well], [view("e", problem="engine is starting")]) == [replace(well, starts=1)]
    past = (PastError(text="rank 1: died", age_s=3.0),)
    known = replace(view("e", address="h:1"), node="10.0.0.1", epoch=4, recent_errors=past)
    (merged,) = merge_statuses([well], [known])
    assert (merged.node, merged.starts, merged.recent_errors, merged.running) == ("10.0.0.1", 4, past, 3)


def test_ages_do_not_make_a_view_another_one() -> None:
    one = view("e", address="h:1")
    assert replace(one, recent_errors=(PastError(text="x", age_s=1.0),)) == one
    assert replace(one, node="elsewhere") != one


class FakeServe:
    """Stands for a handle: answers `describe` with what a test put in."""

    def __init__(self) -> None:
        self.answers: list[object] | Exception = []
        self.time = 100.0

    def broadcast(self, method: str) -> "FakeServe":
        assert method == "describe"
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[object]:
        assert timeout_s > 0
        assert return_exceptions
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers

    def now(self) -> float:
        return self.time


@pytest.fixture
def fake() -> FakeServe:
    return FakeServe()


@pytest.fixture
def directory(fake: FakeServe) -> ServeDirectory:
    handle: Any = fake
    return ServeDirectory(handle, timeout_s=1.0, clock=fake)


async def addresses(directory: ServeDirectory) -> list[str]:
    return [one.address for one in await directory.endpoints()]


async def test_only_serving_replicas_are_endpoints(fake: FakeServe, directory: ServeDirectory) -> None:
    fake.answers = [view("a", address="h:1"), view("b", problem="starting"), RuntimeError("died meanwhile")]
    assert await addresses(directory) == ["h:1"]
    assert [one.replica_id for one in directory.views] == ["a", "b"]


async def test_a_replica_that_serve_hides_for_a_moment_stays(fake: FakeServe, directory: ServeDirectory) -> None:
    fake.answers = [view("a", address="h:1")]
    await directory.endpoints()
    fake.answers = DeploymentUnavailableError(DeploymentID(name="Target"))
    fake.time += 9.9
    assert await addresses(directory) == ["h:1"]
    fake.time += 0.2
    assert await addresses(directory) == []


async def test_a_rebuilt_engine_replaces_its_old_address(fake: FakeServe, directory: ServeDirectory) -> None:
    fake.answers = [view("a", address="h:1")]
    await directory.endpoints()
    fake.answers = [view("a", problem="rank 1: died")]
    assert await addresses(directory) == []
    fake.answers = [view("a", address="h:2")]
    assert await addresses(directory) == ["h:2"]


async def test_drafts_are_offered_with_their_load_and_old_figures_are_marked(
    fake: FakeServe, directory: ServeDirectory
) -> None:
    one, two = view("a", address="h:1"), view("b", address="h:2")
    fake.answers = [replace(one, links=3, sequences=7), two, view("c", problem="the draft is loading")]
    first = DraftOffer(replica_id="a", address="h:1", links=3, sequences=7)
    second = DraftOffer(replica_id="b", address="h:2")
    assert await directory.draft_offers() == [first, second]
    fake.time += 1.0
    fake.answers = [two]
    assert await directory.draft_offers() == [replace(first, fresh=False), second]


async def test_no_answer_is_a_timeout_and_the_last_views_stay(fake: FakeServe, directory: ServeDirectory) -> None:
    fake.answers = [view("a", address="h:1")]
    await directory.endpoints()
    fake.answers = TimeoutError()
    with pytest.raises(TimeoutError):
        await directory.endpoints()
    assert [one.replica_id for one in directory.views] == ["a"]
