"""Deployments that several tests share. Starting one costs half a minute, so each starts once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.collector import Collector, running_collector
from tests.support.served import Served, served

SERVE = Path(__file__).parents[2] / "infra" / "serve"


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Takes the spans of `scripted_cluster`."""
    with running_collector() as made:
        yield made


@pytest.fixture(scope="session")
def scripted_cluster(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Served]:
    """The scripted engine with tp=2 and a draft, on a local Ray cluster of its own.

    Of traces, only those that a client has begun are recorded.
    """
    folder = tmp_path_factory.mktemp("scripted")
    config = folder / "scripted.yaml"
    telemetry = f"telemetry: {{exporter: otlp, endpoint: '{collector.address}', sampling_ratio: 0}}\n"
    config.write_text((SERVE / "scripted.yaml").read_text() + telemetry)
    with served(config, folder / "serve.log") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def laptop_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The real test model with tp=2 and its quantised self-draft: the embedded configuration."""
    with served(SERVE / "laptop.yaml", tmp_path_factory.mktemp("laptop") / "serve.log") as cluster:
        yield cluster
