"""A real Prometheus scrapes a real cluster: every query of the dashboards and every rule has data."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from infra.observability.dashboards.panels import Query
from infra.observability.dashboards.write import DASHBOARDS
from tests.support.drafting import wait_until_drafting
from tests.support.prometheus import Prometheus, prometheus_binary, running_prometheus
from tests.support.served import Served

from outrider.core.generation import GenerationRequest
from outrider.core.speculation import SpeculationChoice, SpeculationPreference
from outrider.rpc.client import OutriderClient

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(prometheus_binary() is None, reason="no prometheus here: apt-get install prometheus"),
]

RULES = Path(__file__).parents[2] / "infra" / "observability" / "prometheus" / "rules.yaml"
EMPTY_SELECTORS: dict[str, str] = {}
"""Selectors in rules that a healthy cluster has no series for, and why."""
# Ray hands its workers' numbers over every ten seconds; a rate needs two of them.
PATIENCE_S = 90.0


@pytest.fixture
def prometheus(scripted_cluster: Served, tmp_path: Path) -> Iterator[Prometheus]:
    log = (scripted_cluster.config.parent / "serve.log").read_text()
    targets = re.findall(r"metrics at http://(\S+)/metrics", log)
    assert targets, log
    with running_prometheus(tmp_path, targets=targets, rules=RULES) as server:
        yield server


def queries() -> dict[str, Query]:
    """Every query of every panel by dashboard, panel and letter, as Grafana would send it."""
    found = {}
    for dashboard in DASHBOARDS:
        for panel in (panel for row in dashboard.rows.values() for panel in row):
            for letter, query in zip("ABCDEFG", panel.queries, strict=False):
                found[f"{dashboard.uid} / {panel.title} / {letter}"] = query
    return found


def substituted(expression: str) -> str:
    for name, value in {"$__rate_interval": "2m", "$SessionName": ".*", "$model_name": ".*"}.items():
        expression = expression.replace(name, value)
    return expression


def selectors(expression: str) -> set[str]:
    """The series that an expression reads. None of ours has a brace inside a quoted value."""
    return set(re.findall(r"(?:ray_|outrider:)[a-z0-9_:]+(?:\{[^}]*\})?", expression))


async def some_load(address: str, stop: asyncio.Event) -> None:
    """A few requests at a time, with and without speculation, until told to stop."""
    async with OutriderClient(address) as client:
        await wait_until_drafting(client)
        seed = 0
        while not stop.is_set():
            seed += 1
            wishes = [SpeculationPreference.ON, SpeculationPreference.ON, SpeculationPreference.OFF]
            requests = [
                # One prompt for all: its second reader finds it in the prefix cache.
                GenerationRequest(
                    text="HELLO" * 20, max_tokens=60, seed=seed, speculation=SpeculationChoice(preference=wish)
                )
                for wish in wishes
            ]
            await asyncio.gather(*(client.generate(one) for one in requests))


async def missing(prometheus: Prometheus, wanted: dict[str, str]) -> dict[str, str]:
    """What returns nothing, asked again until nothing is missing or patience ends."""
    left = dict(wanted)
    with_patience = asyncio.timeout(PATIENCE_S)
    try:
        async with with_patience:
            while left:
                for name, expression in list(left.items()):
                    if await asyncio.to_thread(prometheus.query, expression):
                        del left[name]
                await asyncio.sleep(2)
    except TimeoutError:
        assert with_patience.expired()
    return left


async def test_every_query_and_every_rule_has_data(prometheus: Prometheus, scripted_cluster: Served) -> None:
    stop = asyncio.Event()
    load = asyncio.create_task(some_load(scripted_cluster.address, stop))
    read = {
        selector: selector
        for rule in _rules()
        for selector in selectors(rule["expr"])
        if selector not in EMPTY_SELECTORS
    }
    recorded = {rule["record"]: rule["record"] for rule in _rules() if "record" in rule}
    shown = {name: substituted(one.expr) for name, one in queries().items() if not one.empty_by_design}
    try:
        assert await missing(prometheus, {**read, **recorded, **shown}) == {}
    finally:
        stop.set()
        await load
    assert {rule["name"]: rule.get("lastError", "") for rule in prometheus.rules() if rule["health"] != "ok"} == {}
    for name, one in queries().items():
        if one.empty_by_design:
            await asyncio.to_thread(prometheus.query, substituted(one.expr))
            assert len(one.empty_by_design.split()) > 2, f"{name} says why it is empty"


def _rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
