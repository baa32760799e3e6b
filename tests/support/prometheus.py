"""A Prometheus server of the test's own (Debian's package), asked over its HTTP API."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

__all__ = ["Prometheus", "prometheus_binary", "running_prometheus"]

_START_TIMEOUT_S = 30.0


def prometheus_binary() -> str | None:
    """Where the server is; None: not installed."""
    return shutil.which("prometheus")


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of an expression, now. Fails with the server's own words."""
        answer = self._get(f"/api/v1/query?query={urllib.parse.quote(expression)}")
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def rules(self) -> list[dict[str, Any]]:
        """Every rule, with `health` and `lastError` of its latest evaluation."""
        return [rule for group in self._get("/api/v1/rules")["data"]["groups"] for rule in group["rules"]]

    def _get(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()}") from error
        return found


@contextlib.contextmanager
def running_prometheus(folder: Path, *, targets: Sequence[str], rules: Path) -> Iterator[Prometheus]:
    """A server on the loopback that scrapes `targets` and evaluates `rules` every second."""
    binary = prometheus_binary()
    assert binary is not None
    config = folder / "prometheus.yml"
    scrape = {"job_name": "ray", "static_configs": [{"targets": list(targets)}]}
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [scrape],
    }
    config.write_text(yaml.safe_dump(settings))
    arguments = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([binary, *arguments], stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://127.0.0.1:{_port(process.pid)}")
    finally:
        process.terminate()
        process.wait(20)


def _port(pid: int) -> int:
    """The port that the system chose; the server does not say."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        for one in psutil.Process(pid).net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                return int(one.laddr.port)
        time.sleep(0.05)
    raise AssertionError("Prometheus does not listen")
