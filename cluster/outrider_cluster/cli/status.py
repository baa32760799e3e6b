"""`outrider status`: every engine on one screen."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from outrider.core.dispatch import EngineStatus
from outrider.core.generation import ModelDescription
from outrider.core.speculation import SpeculationReason
from outrider.rpc.client import OutriderClient
from outrider_cluster.cli.calling import client_options
from outrider_cluster.cli.terminal import errors_as_exit_codes

__all__ = ["status"]


def status(
    address: Annotated[str, typer.Option(help="HOST:PORT of the gRPC ingress.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show engines: batch, KV, queue, speculation on or off and why, acceptance, draft links."""
    with errors_as_exit_codes():
        model, engines = asyncio.run(_ask(address))
        if as_json:
            whole = {"model": asdict(model), "engines": [asdict(one) for one in engines]}
            typer.echo(json.dumps(whole, default=lambda one: one.value))
            return
        console = Console(highlight=False)
        console.print(
            f"{model.model}, up to {model.max_model_len} tokens, Outrider {model.server_version}", markup=False
        )
        console.print(engine_table(engines))
        for line in draft_lines(engines):
            console.print(line, markup=False)


async def _ask(address: str) -> tuple[ModelDescription, Sequence[EngineStatus]]:
    async with OutriderClient(address, client_options()) as client:
        return await client.model_info(), await client.speculation_status()


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
    """One line per draft link."""
    lines = []
    for engine in engines:
        for link in engine.draft_links:
            state = "connected" if link.connected else f"not connected ({link.problem or 'no answer yet'})"
            lines.append(
                f"{engine.engine_id} → draft {link.address or '?'}: {state}, {link.open_sequences} sequences, "
                f"round trip {link.round_trip_s * 1000:.1f} ms, lost {link.losses} times"
            )
    return lines


def _speculation(one: EngineStatus) -> str:
    if one.reason is SpeculationReason.ON:
        return f"on ({one.mode.value})"
    return f"off ({one.reason.value})"
