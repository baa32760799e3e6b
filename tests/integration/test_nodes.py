"""Outrider on four nodes with addresses of their own, and each kind of them lost while streams run.

Emulated devices, everything else is real. The nodes are network namespaces, so this takes root. The tests run
in order: each leaves the cluster as it found it, but for the last one.
"""

import shutil
import signal
from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.support.netns import cannot_make_hosts
from tests.support.node_cluster import MAX_TOKENS, NodeCluster, node_cluster, until
from tests.support.remote_client import Stream

from outrider.core.speculation import SpeculationPreference

pytestmark = [
    # The first test of the module waits for the cluster to start.
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(cannot_make_hosts()), reason=cannot_make_hosts()),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed"),
]

PARTITION_S = 30.0
FRONT, ROUTER, DRAFT = (f"ServeReplica:outrider:{one}" for one in ("Target", "Router", "Draft"))
RANK = "PrimaryRankActor"


@pytest.fixture(scope="module")
def cluster() -> Iterator[NodeCluster]:
    with node_cluster() as made:
        yield made


@pytest.fixture(scope="module")
def plain(cluster: NodeCluster) -> list[Stream]:
    """What every seed gives when nothing happens and nothing speculates."""
    return cluster.load(speculation=SpeculationPreference.OFF).results()


Record = Callable[[str, object], None]


def check(streams: Sequence[Stream], expected: Sequence[Stream]) -> None:
    """Every stream has ended well, with the text that it has undisturbed."""
    assert [one.error for one in streams] == [""] * len(streams)
    assert [len(one.token_ids) for one in streams] == [MAX_TOKENS] * len(streams)
    assert [(one.text, one.token_ids) for one in streams] == [(one.text, one.token_ids) for one in expected]


def longest_gap_s(streams: Sequence[Stream]) -> float:
    return max(gap for one in streams for gap in one.gaps_s)


def record_gaps(record: Record, name: str, streams: Sequence[Stream]) -> None:
    """Times between two messages of a stream, over all streams, for the report."""
    gaps_s = sorted(gap for one in streams for gap in one.gaps_s)
    for share in (0.5, 0.99, 1.0):
        record(f"{name}_gap_p{share * 100:g}_s", round(gaps_s[int((len(gaps_s) - 1) * share)], 3))


def test_ranks_routers_and_draft_are_spread_and_find_each_other(cluster: NodeCluster, plain: list[Stream]) -> None:
    for host in (cluster.kept, cluster.lost):
        assert [len(host.processes(title)) for title in (FRONT, RANK, ROUTER, DRAFT)] == [1, 1, 1, 0]
    assert [len(cluster.drafting.processes(title)) for title in (FRONT, RANK, ROUTER, DRAFT)] == [0, 0, 0, 1]
    assert not cluster.head.processes("ServeReplica")
    fast = cluster.load().results()
    check(fast, plain)
    assert any(one.speculative_rounds > 0 for one in fast)
    assert all(engine["totals"]["committed"] > 0 for engine in cluster.status()), "one engine did all the work"


def test_the_loss_of_the_controller_stops_no_stream(cluster: NodeCluster, plain: list[Stream]) -> None:
    load = cluster.load()
    load.wait_under_way()
    old = cluster.head.process("ServeController")
    old.kill()
    check(load.results(), plain)
    until(lambda: any(one.pid != old.pid for one in cluster.head.processes("ServeController")))
    until(lambda: cluster.ready_engines() == 2)


def test_a_stopped_rank_is_dead_to_its_streams(cluster: NodeCluster, plain: list[Stream]) -> None:
    load = cluster.load()
    load.wait_under_way()
    stopped = cluster.lost.process(RANK)
    stopped.send_signal(signal.SIGSTOP)
    check(load.results(), plain)
    until(lambda: not stopped.is_running(), 30)
    until(lambda: cluster.ready_engines() == 2)
    until(lambda: cluster.drafting_engines() == 2)


def test_clients_resume_when_their_router_is_killed(cluster: NodeCluster, plain: list[Stream]) -> None:
    load = cluster.load(resume=True)
    load.wait_under_way()
    victim = cluster.kept.process(ROUTER)
    victim.kill()
    check(load.results(), plain)
    until(lambda: any(one.pid != victim.pid for one in cluster.kept.processes(ROUTER)))
    until(lambda: cluster.ready_engines() == 2)


def test_a_partitioned_draft_is_missed_by_nobody_and_comes_back(
    cluster: NodeCluster, plain: list[Stream], record_testsuite_property: Record
) -> None:
    load = cluster.load()
    load.wait_under_way()
    with cluster.cut_off(cluster.drafting, PARTITION_S):
        interrupted = load.results()
        check(interrupted, plain)
        alone = cluster.load().results()
        check(alone, plain)
        assert all(one.speculative_rounds == 0 for one in alone)
        until(lambda: cluster.drafting_engines() == 0)
    # A step of the same machine under the same load is the measure, not a time.
    assert longest_gap_s(interrupted) <= 3 * longest_gap_s(plain)
    record_gaps(record_testsuite_property, "plain", plain)
    record_gaps(record_testsuite_property, "draft_cut_off", interrupted)
    record_gaps(record_testsuite_property, "without_draft", alone)
    until(lambda: cluster.drafting_engines() == 2, 90)
    after = cluster.load().results()
    check(after, plain)
    assert any(one.speculative_rounds > 0 for one in after)


def test_streams_and_cluster_outlive_the_head(cluster: NodeCluster, plain: list[Stream]) -> None:
    load = cluster.load()
    load.wait_under_way()
    cluster.head.lose_power()
    check(load.results(), plain)
    cluster.nodes.start_head()
    until(lambda: cluster.head.processes("ServeController"))
    until(lambda: cluster.ready_engines() == 2)
    check(cluster.load().results(), plain)
    # The controller does its work again: it replaces what is lost.
    victim = cluster.lost.process(ROUTER)
    victim.kill()
    until(lambda: any(one.pid != victim.pid for one in cluster.lost.processes(ROUTER)), 90)


def test_the_streams_of_a_lost_target_node_go_on_on_the_other(
    cluster: NodeCluster, plain: list[Stream], record_testsuite_property: Record
) -> None:
    until(lambda: cluster.ready_engines() == 2)
    load = cluster.load()
    load.wait_under_way()
    cluster.lost.lose_power()
    streams = load.results()
    check(streams, plain)
    assert any(one.rounds < len(one.gaps_s) for one in streams), "no stream ran on the lost node"
    record_gaps(record_testsuite_property, "target_lost", streams)
    until(lambda: cluster.ready_engines() == 1)
    check(cluster.load().results(), plain)
