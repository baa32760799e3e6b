"""`outrider serve` as a child process: started, spoken to, hurt, stopped, and checked for leftovers."""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Served", "served"]

_START_TIMEOUT_S = 100.0
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running deployment."""

    address: str
    """Of the gRPC ingress."""
    http_address: str
    """Of the HTTP door; empty where it is not enabled."""
    config: Path
    process: psutil.Process

    def pids(self, title: str) -> list[int]:
        """Processes of the deployment whose title contains `title`, oldest first."""
        found = []
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if title in " ".join(child.cmdline()):
                    found.append(child)
        return [child.pid for child in sorted(found, key=lambda child: child.pid)]

    def kill(self, title: str) -> None:
        """SIGKILL the one process with this title."""
        self.signal(title, signal.SIGKILL)

    def reload(self, text: str) -> None:
        """Give the deployment another configuration while it runs."""
        self.config.write_text(text)
        self.process.send_signal(signal.SIGHUP)

    def signal(self, title: str, number: signal.Signals) -> int:
        """Send a signal to the one process with this title; returns its id."""
        (pid,) = self.pids(title)
        psutil.Process(pid).send_signal(number)
        return pid


@contextlib.contextmanager
def served(config: Path, log: Path) -> Iterator[Served]:
    """Serve a configuration; at the end stop it as Ctrl-C does, and fail if a process is left."""
    command = [sys.executable, "-c", "from outrider_cluster.cli import main; main()", "serve", str(config)]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    assert process.stdout is not None
    hurry = threading.Timer(_START_TIMEOUT_S, process.send_signal, [signal.SIGTERM])
    hurry.start()
    line = process.stdout.readline()
    hurry.cancel()
    descendants = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    try:
        assert line.startswith("ready grpc="), f"{line!r}; {log.read_text()[-4000:]}"
        addresses = dict(word.split("=", 1) for word in line.split()[1:])
        yield Served(
            address=addresses["grpc"],
            http_address=addresses.get("http", ""),
            config=config,
            process=psutil.Process(process.pid),
        )
    finally:
        if process.poll() is None:
            descendants = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=_STOP_TIMEOUT_S)
    assert rest == "", "one line on standard output, no more"
    assert process.returncode == 0, log.read_text()[-4000:]
    assert [child for child in descendants if child.is_running()] == []
