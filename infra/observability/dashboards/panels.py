"""What a dashboard is made of: rows of panels, each with its queries, and PromQL that most of them need.

A query that is empty on a healthy laptop says why in `empty_by_design`; a test runs all the others
against a real Prometheus and fails where one returns nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "DRAFTS",
    "STATE",
    "WHERE",
    "Dashboard",
    "Panel",
    "Query",
    "increase",
    "level",
    "one",
    "quantiles",
    "share",
]

WHERE = 'SessionName=~"$SessionName", model_name=~"$model_name"'
"""Filter of every query on our own metrics."""
DRAFTS = 'SessionName=~"$SessionName"'
"""Drafts carry the name of their own model."""
STATE = "state-timeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One expression and the legend of its series."""

    expr: str
    legend: str
    empty_by_design: str = ""
    """Why a cluster without faults, GPUs or cached drafting has no such series; empty: it must have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    description: str = ""
    kind: str = "timeseries"
    stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard: rows by title."""

    uid: str
    title: str
    description: str
    rows: Mapping[str, Sequence[Panel]]


def increase(counter: str, by: str = "engine", where: str = WHERE) -> str:
    """Per second, summed over everything but `by`."""
    return f"sum by ({by}) (rate(ray_{counter}_total{{{where}}}[$__rate_interval]))"


def share(part: str, whole: str, by: str = "engine", where: str = WHERE) -> str:
    """One counter's rate over another's; nothing while the other stands still."""
    return f"{increase(part, by, where)} / ({increase(whole, by, where)} > 0)"


def level(gauge: str, by: str = "engine", where: str = WHERE, how: str = "max") -> str:
    """A gauge. `max`: for some seconds a dead worker and its successor both have one."""
    return f"{how} by ({by}) (ray_{gauge}{{{where}}})"


def quantiles(histogram: str, *shares: float, by: str = "") -> list[Query]:
    """Quantiles of a histogram over all that fill it."""
    labels = f"le, {by}" if by else "le"
    rate = f"sum by ({labels}) (rate(ray_{histogram}_bucket{{{WHERE}}}[$__rate_interval]))"
    return [Query(expr=f"histogram_quantile({one}, {rate})", legend=f"p{one * 100:g}") for one in shares]


def one(expr: str, legend: str, empty_by_design: str = "") -> list[Query]:
    """A panel's only query."""
    return [Query(expr=expr, legend=legend, empty_by_design=empty_by_design)]
