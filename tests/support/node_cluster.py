"""Outrider on several hosts of a test's own: a head, two targets, a draft, and a client beside them."""

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.netns import Host, network
from tests.support.ray_nodes import RayNodes, finish_start
from tests.support.remote_client import Load, RemoteClient

from outrider.core.speculation import SpeculationPreference

__all__ = ["MAX_TOKENS", "SEEDS", "NodeCluster", "node_cluster", "until"]

SEEDS = range(16)
MAX_TOKENS = 150
"""Of each stream."""

GRPC_PORT = 9000
_READY_TIMEOUT_S = 120.0
_LOOK_AGAIN_S = 0.2

# Two targets do not fit on one host, and nothing else fits on the draft's.
_CPUS = 2
_CONFIG = """
engine: emulated
model: {{name: emulated, max_model_len: 4096}}
emulated: {{acceptance: 0.8, slowdown: 4}}
target:
  num_replicas: 2
  node_labels: {{role: target}}
  kv: {{block_size: 16, num_blocks: 8192}}
  max_num_seqs: 32
  cpus_per_rank: 1.5
  timeouts: {{start_s: 90, heartbeat_interval_s: 0.5, heartbeat_s: 4, rebuild_backoff_s: 0.2}}
draft:
  node_labels: {{role: draft}}
  kv: {{block_size: 16, num_blocks: 16384}}
  num_cpus: 1.5
speculation: {{max_num_draft_tokens: 4, mode: sequential, preference: "on", batch_size_threshold: null}}
router:
  num_replicas: 2
  node_labels: {{role: target}}
  max_replicas_per_node: 1
grpc: {{port: {grpc_port}}}
http: {{port: 8000}}
ray: {{address: "{address}", health_check_timeout_s: 20, graceful_shutdown_s: 2}}
"""


class NodeCluster:
    """The hosts, by what runs there, and how to ask them."""

    def __init__(self, hosts: dict[str, Host], nodes: RayNodes, client: RemoteClient) -> None:
        self.head, self.kept, self.lost, self.drafting = (hosts[one] for one in ("head", "kept", "lost", "drafting"))
        self.nodes = nodes
        self.client = client
        self.address = f"{self.kept.address}:{GRPC_PORT}"
        """The ingress on the target host that no test takes away."""

    def load(
        self,
        *,
        max_tokens: int = MAX_TOKENS,
        resume: bool = False,
        speculation: SpeculationPreference = SpeculationPreference.AUTO,
    ) -> Load:
        """Start a stream for each seed."""
        return self.client.load(self.address, SEEDS, max_tokens=max_tokens, resume=resume, speculation=speculation)

    @contextlib.contextmanager
    def cut_off(self, host: Host, seconds: float) -> Iterator[None]:
        """No packet from or to a host for the block, and for so many seconds at least."""
        until_s = time.monotonic() + seconds
        host.plug(connected=False)
        try:
            yield
            time.sleep(max(until_s - time.monotonic(), 0.0))
        finally:
            host.plug(connected=True)

    def status(self) -> list[dict[str, Any]]:
        """The engines that the routers know."""
        return self.client.status(self.address)

    def ready_engines(self) -> int:
        """Engines that take requests."""
        return sum(one["ready"] for one in self.status())

    def drafting_engines(self) -> int:
        """Engines that are connected to a draft."""
        return sum(any(link["connected"] for link in one["draft_links"]) for one in self.status())


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until other hosts have come to a state. The time-out is a failure, never a measure."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(_LOOK_AGAIN_S)


@contextlib.contextmanager
def node_cluster() -> Iterator[NodeCluster]:
    """The cluster for the duration of the block. Nothing is left of it, whatever happens."""
    with contextlib.ExitStack() as stack:
        # Sockets live there, whose paths may not be long.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="or", ignore_cleanup_errors=True)))
        made = stack.enter_context(network())
        hosts = {name: made.host(name) for name in ("store", "head", "kept", "lost", "drafting", "client")}
        nodes = RayNodes(hosts["head"], hosts["store"], folder)
        nodes.start_store()
        nodes.start_head()
        for name, role in (("kept", "target"), ("lost", "target"), ("drafting", "draft")):
            finish_start([nodes.start_worker(hosts[name], {"role": role}, cpus=_CPUS)])
        config = folder / "nodes.yaml"
        config.write_text(_CONFIG.format(grpc_port=GRPC_PORT, address=nodes.address))
        # A driver takes the head's address for its own, from a file that all hosts share here.
        stack.enter_context(_served(hosts["head"], nodes, config))
        client = RemoteClient(hosts["client"], nodes.env)
        stack.callback(client.close)
        cluster = NodeCluster(hosts, nodes, client)
        until(lambda: cluster.ready_engines() == 2)
        until(lambda: cluster.drafting_engines() == 2)
        yield cluster


@contextlib.contextmanager
def _served(host: Host, nodes: RayNodes, config: Path) -> Iterator[None]:
    """`outrider serve` on a host, killed at the end; what it has deployed outlives it."""
    log = config.with_suffix(".log")
    command = host.command(sys.executable, "-c", "from outrider_cluster.cli import main; main()", "serve", str(config))
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=nodes.env, text=True, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        hurry = threading.Timer(_READY_TIMEOUT_S, process.kill)
        hurry.start()
        try:
            line = process.stdout.readline()
            hurry.cancel()
            assert line.startswith("ready grpc="), f"{line!r}; {log.read_text()[-4000:]}"
            yield
        finally:
            hurry.cancel()
            process.kill()
