"""Hosts of a test's own: network namespaces on a bridge that leads nowhere else.

The bridge has a namespace of its own too, so that nothing outside can reach the hosts and they reach
nothing outside. Addresses are those of TEST-NET-1 (RFC 5737). Needs root and iproute2.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping

import psutil

__all__ = ["Host", "Network", "cannot_make_hosts", "network"]

_PREFIX = "192.0.2"
_TIMEOUT_S = 20.0


def cannot_make_hosts() -> str:
    """Why this machine cannot make namespaces; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    probe = f"orprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=_TIMEOUT_S)
    if made.returncode == 0:
        _ip("netns", "del", probe)
        return ""
    return f"no network namespaces here: {made.stderr.strip()}"


class Host:
    """One namespace with an address of its own."""

    def __init__(self, name: str, switch: str, number: int) -> None:
        self.name = name
        self.address = f"{_PREFIX}.{number}"
        self._switch = switch
        self._port = f"p{number}"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", switch, "link", "set", self._port, "master", "br0", "up")
        _ip("-n", name, "address", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        # Libraries ask the routing table for their own address; no packet goes that way.
        _ip("-n", name, "route", "add", "default", "via", f"{_PREFIX}.254")

    def command(self, *args: str) -> list[str]:
        """A command line that runs on this host."""
        return ["ip", "netns", "exec", self.name, *args]

    def run(self, *args: str, env: Mapping[str, str], timeout_s: float) -> str:
        """Run a command to its end; returns what it printed. Raises `AssertionError` with that when it fails."""
        done = subprocess.run(
            self.command(*args), env=env, text=True, timeout=timeout_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    def plug(self, *, connected: bool) -> None:
        """Connect the host to the switch, or cut it off: packets vanish, connections stay."""
        _ip("-n", self._switch, "link", "set", self._port, "up" if connected else "down")

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Processes of this host whose command line contains `title`, oldest first."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, timeout=_TIMEOUT_S
        ).stdout
        found = []
        for pid in sorted(int(one) for one in listed.split()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if title in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def process(self, title: str) -> psutil.Process:
        """The one process with this title."""
        (found,) = self.processes(title)
        return found

    def lose_power(self) -> None:
        """SIGKILL everything that runs here, until nothing does."""
        for _ in range(50):
            running = self.processes()
            for one in running:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)
            if not psutil.wait_procs(running, timeout=5)[1] and not self.processes():
                return
        raise AssertionError(f"{self.name} does not die: {self.processes()}")

    def remove(self) -> None:
        """End everything here and take the namespace away."""
        self.lose_power()
        _ip("netns", "del", self.name)


class Network:
    """A switch and the hosts on it."""

    def __init__(self) -> None:
        self._id = f"or{os.getpid()}"
        self._switch = f"{self._id}sw"
        self._hosts: list[Host] = []
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "address", "add", f"{_PREFIX}.254/24", "dev", "br0")
        _ip("-n", self._switch, "link", "set", "br0", "up")

    def host(self, name: str) -> Host:
        """A new host."""
        self._hosts.append(Host(f"{self._id}{name}", self._switch, len(self._hosts) + 1))
        return self._hosts[-1]

    def remove(self) -> None:
        """Take everything away, whatever runs there."""
        with contextlib.ExitStack() as stack:
            stack.callback(_ip, "netns", "del", self._switch)
            for host in self._hosts:
                stack.callback(host.remove)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network for the duration of the block; nothing of it is left, also after a failure."""
    made = Network()
    try:
        yield made
    finally:
        made.remove()


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=_TIMEOUT_S)
    assert done.returncode == 0, f"ip {' '.join(args)}: {done.stderr}"
