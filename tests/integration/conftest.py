"""Deployments that several tests share. Starting one costs half a minute, so each starts once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.served import Served, served

SERVE = Path(__file__).parents[2] / "infra" / "serve"


@pytest.fixture(scope="session")
def scripted_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The scripted engine with tp=2 and a draft, on a local Ray cluster of its own."""
    folder = tmp_path_factory.mktemp("scripted")
    config = folder / "scripted.yaml"
    config.write_text((SERVE / "scripted.yaml").read_text())
    with served(config, folder / "serve.log") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def laptop_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The real test model with tp=2 and its quantised self-draft: the embedded configuration."""
    with served(SERVE / "laptop.yaml", tmp_path_factory.mktemp("laptop") / "serve.log") as cluster:
        yield cluster
