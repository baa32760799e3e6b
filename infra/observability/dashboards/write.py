"""Writes the Grafana dashboards from the tables beside it; `--check` fails where a file differs.

.venv/bin/python -m infra.observability.dashboards.write [--check]
"""

import json
import sys
from pathlib import Path
from typing import Any

from infra.observability.dashboards.fleet import FLEET
from infra.observability.dashboards.panels import Dashboard, Panel
from infra.observability.dashboards.serving import SERVING
from infra.observability.dashboards.speculation import SPECULATION

__all__ = ["DASHBOARDS", "FOLDER", "rendered"]

DASHBOARDS = (SERVING, SPECULATION, FLEET)
FOLDER = Path(__file__).parents[1] / "grafana"
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def rendered(dashboard: Dashboard) -> dict[str, Any]:
    """Grafana's model of one dashboard."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in dashboard.rows.items():
        header = {"type": "row", "title": title, "collapsed": False, "panels": []}
        panels.append({**header, "id": len(panels) + 1, "gridPos": {"h": 1, "w": 24, "x": 0, "y": top}})
        top += 1
        for index, panel in enumerate(row):
            place = {"h": HEIGHT, "w": WIDTH, "x": WIDTH * (index % COLUMNS), "y": top + HEIGHT * (index // COLUMNS)}
            panels.append(panel_model(panel, len(panels) + 1, place))
        top += HEIGHT * -(-len(row) // COLUMNS)
    others = [one for one in DASHBOARDS if one is not dashboard]
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["outrider"],
        "editable": True,
        "schemaVersion": 38,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [
            {"type": "link", "title": one.title, "url": f"/d/{one.uid}", "includeVars": True, "keepTime": True}
            for one in others
        ],
        "templating": {"list": [source_variable(), *(label_variable(name) for name in ("SessionName", "model_name"))]},
        "panels": panels,
    }


def panel_model(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    """One panel with its queries."""
    stacked = {"stacking": {"mode": "normal"}, "fillOpacity": 40} if panel.stacked else {"fillOpacity": 8}
    custom = stacked if panel.kind == "timeseries" else {}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}} if panel.kind == "timeseries" else {},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for index, query in enumerate(panel.queries)
        ],
    }


def source_variable() -> dict[str, Any]:
    """Ray's dashboard sets it by this name."""
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def label_variable(label: str) -> dict[str, Any]:
    """One value of a label, or all. Ray's dashboard sets `SessionName`."""
    query = f"label_values(ray_outrider_engine_ready, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": label},
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "multi": False,
        "refresh": 2,
        "sort": 1,
    }


def main(arguments: list[str]) -> int:
    """Write every file, or compare."""
    stale = []
    for dashboard in DASHBOARDS:
        path = FOLDER / f"{dashboard.uid}.json"
        text = json.dumps(rendered(dashboard), indent=1, ensure_ascii=False) + "\n"
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
    if stale:
        print(
            f"not what the tables say: {', '.join(stale)}; run python -m infra.observability.dashboards.write",
            file=sys.stderr,
        )
    return len(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
