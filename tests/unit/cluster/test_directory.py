"""Who prefers which draft, and what is said about engines that do not serve."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from outrider.core.dispatch import EngineStatus
from outrider.core.fleet import PastError
from outrider.core.ports import Endpoint
from outrider_cluster.data_plane import ReplicaView
from outrider_cluster.deployment_service import merge_statuses
from outrider_cluster.directory import ServeDirectory, in_order_of_preference

DRAFTS = [Endpoint(replica_id=f"d{index}", address=f"h:{index}") for index in range(4)]


def test_every_engine_lists_every_draft_in_a_stable_order() -> None:
    order = in_order_of_preference(DRAFTS, "e1")
    assert sorted(order) == ["h:0", "h:1", "h:2", "h:3"]
    assert in_order_of_preference(DRAFTS[::-1], "e1") == order


def test_engines_spread_over_the_drafts() -> None:
    favourites = Counter(in_order_of_preference(DRAFTS, f"engine-{index}")[0] for index in range(400))
    assert len(favourites) == 4
    assert min(favourites.values()) > 50


def test_a_leaving_draft_moves_only_the_engines_that_preferred_it() -> None:
    for index in range(50):
        before = in_order_of_preference(DRAFTS, f"engine-{index}")
        after = in_order_of_preference(DRAFTS[1:], f"engine-{index}")
        assert after == [address for address in before if address != "h:0"]


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


async def test_no_answer_is_a_timeout_and_the_last_views_stay(fake: FakeServe, directory: ServeDirectory) -> None:
    fake.answers = [view("a", address="h:1")]
    await directory.endpoints()
    fake.answers = TimeoutError()
    with pytest.raises(TimeoutError):
        await directory.endpoints()
    assert [one.replica_id for one in directory.views] == ["a"]
