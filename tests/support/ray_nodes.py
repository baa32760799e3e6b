"""A Ray cluster on hosts of a test's own: one raylet per host, the head's state in Redis."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.netns import Host

__all__ = ["HEAD_PORT", "RayNodes"]

HEAD_PORT = 6379
_REDIS_PORT = 6390
_START_TIMEOUT_S = 90.0
_OBJECT_STORE_BYTES = 100 * 1024 * 1024


class RayNodes:
    """Starts Redis and raylets. Everything ends with its host."""

    def __init__(self, head: Host, store: Host, folder: Path) -> None:
        """`folder`: where Ray keeps logs and sockets; a short path, since sockets have a limit of 107 bytes."""
        self._head = head
        self._store = store
        self._folder = folder
        self.address = f"{head.address}:{HEAD_PORT}"
        """Where drivers join."""
        self.env = {
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_REDIS_ADDRESS": f"{store.address}:{_REDIS_PORT}",
            "OMP_NUM_THREADS": "1",
        }

    def start_store(self) -> None:
        """Start Redis; the cluster's state is only there."""
        command = ["redis-server", "--bind", self._store.address, "--port", str(_REDIS_PORT), "--protected-mode", "no"]
        self._store.run(
            *command, "--daemonize", "yes", "--save", "", "--dir", str(self._folder), env=self.env, timeout_s=20
        )

    def start_head(self) -> None:
        """Start the head, or start it again with what Redis knows. It runs no replicas."""
        # Ray looks for a running head in this file and in all processes of the machine, other hosts' included.
        (self._folder / "ray_current_cluster").unlink(missing_ok=True)
        # A node that is cut off for half a minute is still there afterwards: the default of 5 is at the edge of that.
        system = json.dumps({"health_check_failure_threshold": 12})
        self._start(
            self._head,
            "--head",
            f"--port={HEAD_PORT}",
            f"--temp-dir={self._folder}",
            f"--system-config={system}",
            "--include-dashboard=false",
        )

    def start_worker(self, host: Host, labels: Mapping[str, str], *, cpus: int) -> "subprocess.Popen[str]":
        """Begin to start a raylet; `finish_start` waits for it."""
        text = ",".join(f"{name}={value}" for name, value in labels.items())
        return self._begin(host, f"--address={self.address}", f"--labels={text}", cpus=cpus)

    def _start(self, host: Host, *options: str) -> None:
        finish_start([self._begin(host, *options, cpus=0)])

    def _begin(self, host: Host, *options: str, cpus: int) -> "subprocess.Popen[str]":
        ray = str(Path(sys.executable).with_name("ray"))
        command = host.command(
            ray,
            "start",
            *options,
            f"--node-ip-address={host.address}",
            f"--num-cpus={cpus}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            "--disable-usage-stats",
        )
        return subprocess.Popen(
            command, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )


def finish_start(starting: Sequence["subprocess.Popen[str]"]) -> None:
    """Wait until raylets run."""
    for one in starting:
        printed, _ = one.communicate(timeout=_START_TIMEOUT_S)
        assert one.returncode == 0, printed[-4000:]
