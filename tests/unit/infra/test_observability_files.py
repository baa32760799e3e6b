"""Dashboards and rules against the definitions of the metrics, without a server."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from infra.observability.dashboards.write import DASHBOARDS, FOLDER, rendered

from outrider.telemetry.metrics import ALL_METRICS, MetricKind

PROMETHEUS = Path(__file__).parents[3] / "infra" / "observability" / "prometheus"
RULES = (PROMETHEUS / "rules.yaml").read_text()
ALERTS = [rule for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"] if "alert" in rule]
OWN = r"ray_(?:outrider|spec_decode|gen_ai)_[a-z0-9_]+"


def exported() -> dict[str, set[str]]:
    """Names as Prometheus sees them, with the labels that we write."""
    suffixes = {
        MetricKind.COUNTER: ("_total",),
        MetricKind.GAUGE: ("",),
        MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
    }
    return {f"ray_{one.name}{end}": set(one.labels) for one in ALL_METRICS for end in suffixes[one.kind]}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.uid)
def test_the_files_are_what_the_tables_say(dashboard: object) -> None:
    (one,) = [one for one in DASHBOARDS if one is dashboard]
    assert json.loads((FOLDER / f"{one.uid}.json").read_text()) == rendered(one)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.uid)
def test_panels_have_places_of_their_own_and_ask_the_chosen_source(dashboard: object) -> None:
    (model,) = [rendered(one) for one in DASHBOARDS if one is dashboard]
    variables = {one["name"] for one in model["templating"]["list"]}
    cells: set[tuple[int, int]] = set()
    for panel in model["panels"]:
        place = panel["gridPos"]
        taken = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in taken) < 24, panel["title"]
        cells |= taken
        for one in (panel, *panel.get("targets", ())) if panel["type"] != "row" else ():
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for query in panel.get("targets", ()):
            assert set(re.findall(r"\$(\w+)", query["expr"])) - variables <= {"__rate_interval"}, panel["title"]
    ids = [one["id"] for one in model["panels"]]
    assert len(set(ids)) == len(ids)
    assert {"datasource", "SessionName"} <= variables, "Ray's dashboard hands them over by these names"


def test_no_other_dashboard_lies_about() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {one.uid for one in DASHBOARDS}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.uid)
def test_dashboards_ask_for_metrics_that_exist(dashboard: object) -> None:
    names = set(re.findall(OWN, json.dumps([rendered(one) for one in DASHBOARDS if one is dashboard])))
    assert names
    assert names - exported().keys() == set()


def test_rules_ask_for_metrics_that_exist() -> None:
    assert set(re.findall(OWN, RULES)) - exported().keys() == set()


def test_every_metric_is_shown_or_watched() -> None:
    everywhere = RULES + json.dumps([rendered(one) for one in DASHBOARDS])
    unseen = {one.name for one in ALL_METRICS if f"ray_{one.name}" not in everywhere}
    assert unseen == {
        # Their ratios to what is shown say nothing new; they are there for those who count.
        "outrider_draft_steps",
        "outrider_draft_rounds",
        "outrider_draft_drafted_tokens",
        "outrider_draft_outcomes",
        "outrider_draft_late_laws",
        "outrider_draft_adopted",
        "outrider_draft_prefill_tokens",
        "outrider_draft_dropped_events",
        "outrider_draft_link_open_sequences",
        "outrider_engine_sequences_finished",
        "outrider_router_engine_connects",
    }


@pytest.mark.parametrize("alert", ALERTS, ids=lambda one: one["alert"])
def test_every_alert_fires_in_a_test(alert: dict[str, object]) -> None:
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yaml").read_text())["tests"]
    fired = {case["alertname"] for one in tests for case in one.get("alert_rule_test", []) if case["exp_alerts"]}
    assert alert["alert"] in fired


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: apt-get install prometheus")
@pytest.mark.parametrize("arguments", [("check", "rules", "rules.yaml"), ("test", "rules", "rules_test.yaml")])
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
