"""What `outrider status` shows, on one screen of 80 columns."""

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.core.dispatch import EngineStatus
from outrider.core.fleet import FleetStatus, PastError
from outrider.core.generation import ModelDescription
from outrider.core.speculation import SpeculationReason

__all__ = ["draft_lines", "engine_table", "error_lines", "fleet_lines", "status_screen"]

_MINUTE_S, _HOUR_S = 60, 3600
_SHOWN_ERRORS = 3


def status_screen(model: ModelDescription, engines: Sequence[EngineStatus], fleet: FleetStatus) -> RenderableType:
    """Everything, top down: what serves, what it runs on, the engines, their drafts, what went wrong."""
    head = f"{model.model}, up to {model.max_model_len} tokens, Outrider {model.server_version}"
    rest = (*draft_lines(engines), *error_lines(engines, fleet))
    # Text, not markup: these hold other people's words.
    return Group(Text(head), *map(Text, fleet_lines(engines, fleet)), engine_table(engines), *map(Text, rest))


def fleet_lines(engines: Sequence[EngineStatus], fleet: FleetStatus) -> list[str]:
    """A line for the nodes, and one for each kind of replica."""
    lines = []
    if fleet.nodes:
        lines.append("nodes: " + ", ".join(_node_words(engines, fleet)))
    for one in fleet.deployments:
        others = f", {one.other} starting or leaving" if one.other else ""
        why = f": {one.message}" if one.message else ""
        lines.append(f"{one.name}: {one.running} running{others}, {one.state}{why}")
    return lines


def _node_words(engines: Sequence[EngineStatus], fleet: FleetStatus) -> Iterator[str]:
    for node in fleet.nodes:
        if not node.alive:
            yield f"{node.address} LOST"
            continue
        held = [one.engine_id for one in engines if one.node == node.address]
        with_engines = f" with {' '.join(held)}" if held else ""
        yield f"{node.address} ({node.cpus:g} CPU, {node.gpus:g} GPU){with_engines}"


def engine_table(engines: Sequence[EngineStatus]) -> Table:
    """One row per engine, within 80 columns."""
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("engine", "state", "run", "wait", "KV", "speculation", "K", "accepted", "speed-up"):
        words = heading in ("state", "speculation")
        # "(sequential)" stays on one line.
        least = 12 if heading == "speculation" else len(heading)
        table.add_column(heading, no_wrap=not words, overflow="fold", min_width=least)
    for one in engines:
        table.add_row(
            one.engine_id,
            one.problem or ("ready" if one.ready else "not ready"),
            str(one.running),
            str(one.waiting),
            f"{one.kv_usage:.0%}",
            _speculation(one),
            f"{one.mean_num_draft_tokens:.1f}",
            "–" if one.acceptance_rate is None else f"{one.acceptance_rate:.0%}",
            "–" if one.estimated_speedup is None else f"{one.estimated_speedup:.2f}×",
        )
    return table


def draft_lines(engines: Sequence[EngineStatus]) -> list[str]:
    """One line per draft link, and one per engine that is not in its first life."""
    lines = []
    for engine in engines:
        for link in engine.draft_links:
            state = "connected" if link.connected else f"not connected ({link.problem or 'no answer yet'})"
            lines.append(
                f"{engine.engine_id} → draft {link.address or '?'}: {state}, {link.open_sequences} sequences, "
                f"round trip {link.round_trip_s * 1000:.1f} ms, lost {link.losses} times"
            )
        if engine.starts > 1:
            lines.append(f"{engine.engine_id} was rebuilt {engine.starts - 1} times")
    return lines


def error_lines(engines: Sequence[EngineStatus], fleet: FleetStatus) -> list[str]:
    """The last errors, latest first: those of engines by their fronts, and of the router that answered."""
    errors = [
        PastError(text=f"{engine.engine_id}: {one.text}", age_s=one.age_s)
        for engine in engines
        for one in engine.recent_errors
    ]
    errors.extend(fleet.recent_errors)
    latest = sorted(errors, key=lambda one: one.age_s)[:_SHOWN_ERRORS]
    return ["last errors:"] + [f"  {_ago(one.age_s):>8} ago  {one.text}" for one in latest] if latest else []


def _ago(age_s: float) -> str:
    if age_s < _MINUTE_S:
        return f"{age_s:.0f} s"
    return f"{age_s / _MINUTE_S:.0f} min" if age_s < _HOUR_S else f"{age_s / _HOUR_S:.1f} h"


def _speculation(one: EngineStatus) -> str:
    if one.reason is SpeculationReason.ON:
        return f"on ({one.mode.value})"
    return f"off ({one.reason.value})"
