"""`outrider status` against a real cluster: nodes, replicas, and what went wrong lately."""

import asyncio
import json
import re
import signal
import subprocess
import sys

import pytest
from tests.support.drafting import wait_until_drafting
from tests.support.served import Served

from outrider.core.dispatch import EngineStatus
from outrider.core.fleet import FleetStatus
from outrider.rpc.client import OutriderClient

pytestmark = pytest.mark.timeout(240)

COMMAND = [sys.executable, "-c", "from outrider_cluster.cli import main; main()", "status"]


async def test_status_names_nodes_replicas_and_the_rank_that_failed(scripted_cluster: Served) -> None:
    async with OutriderClient(scripted_cluster.address) as client:
        await wait_until_drafting(client)

        async def look() -> tuple[EngineStatus, FleetStatus]:
            engines, fleet = await client.whole_status()
            return engines[0], fleet

        starts = (await look())[0].starts
        scripted_cluster.kill("PeerRankActor")

        async with asyncio.timeout(60):
            engine, fleet = await look()
            # The engine is back, and its front still knows why it was away.
            while not (engine.ready and engine.recent_errors and engine.starts > starts):
                await asyncio.sleep(0.2)
                engine, fleet = await look()
    assert engine.recent_errors[0].text.startswith("rank 1: its process has died")
    (node,) = fleet.nodes
    assert (node.alive, node.address) == (True, engine.node)
    assert {one.name: one.running for one in fleet.deployments} == {"Router": 1, "Target": 1, "Draft": 1}


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_watching_looks_again_and_again_until_it_is_stopped(scripted_cluster: Served, stop: signal.Signals) -> None:
    arguments = ["--watch", "--json", "--interval", "0.2", "--address", scripted_cluster.address]
    # As a shell starts what runs in the background: whoever runs the tests may be such a process too.
    ignoring = [
        sys.executable,
        "-c",
        "import os, signal, sys; signal.signal(2, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])",
    ]
    with subprocess.Popen([*ignoring, *COMMAND, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(stop)
        assert process.wait(20) == 0
    assert [len(one["engines"]) for one in looks] == [1, 1]
    assert looks[0]["deployments"]


def test_one_screen(scripted_cluster: Served) -> None:
    done = subprocess.run(
        [*COMMAND, "--address", scripted_cluster.address], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) <= 25
    for word in ("nodes: ", "Router: 1 running, healthy", "speculation", "→ draft "):
        assert any(word in line for line in lines), done.stdout


NAMES = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, namespace="serve")
print("\\n".join(one["name"] for one in ray.util.list_named_actors(all_namespaces=True)))
"""


def test_actors_carry_engine_and_rank_in_their_names(scripted_cluster: Served) -> None:
    arguments = [word for child in scripted_cluster.process.children(recursive=True) for word in child.cmdline()]
    address = next(found[1] for word in arguments if (found := re.search(r"--gcs-address=(\S+)", word)))
    done = subprocess.run(
        [sys.executable, "-c", NAMES, address], capture_output=True, text=True, timeout=60, check=True
    )
    ranks = re.findall(r"^engine (\S+) epoch (\d+) rank (\d)$", done.stdout, re.MULTILINE)
    assert [rank for *_, rank in sorted(ranks)] == ["0", "1"], done.stdout
    assert len({(engine, epoch) for engine, epoch, _ in ranks}) == 1
