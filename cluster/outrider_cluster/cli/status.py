"""`outrider status`: the whole deployment on one screen, once or again and again."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from outrider.core.dispatch import EngineStatus
from outrider.core.errors import OutriderError
from outrider.core.fleet import FleetStatus
from outrider.core.generation import ModelDescription
from outrider.rpc.client import OutriderClient
from outrider_cluster.cli.calling import client_options
from outrider_cluster.cli.status_screen import status_screen
from outrider_cluster.cli.terminal import errors_as_exit_codes, messages
from outrider_cluster.stopping import StopSignals

__all__ = ["status"]

_Answer = tuple[ModelDescription, Sequence[EngineStatus], FleetStatus]


def status(
    address: Annotated[str, typer.Option(help="HOST:PORT of the gRPC ingress.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a look.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C or SIGTERM.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Show nodes, replicas, batch, KV, queue, speculation on or off and why, acceptance, drafts, last errors."""
    with errors_as_exit_codes():
        if watch:
            # Ctrl-C alone would not do: a shell starts what runs in the background with SIGINT ignored.
            with StopSignals():
                asyncio.run(_watch(address, interval, as_json=as_json))
        answer = asyncio.run(_ask(address))
        if as_json:
            typer.echo(_json(answer))
        else:
            Console(highlight=False).print(status_screen(*answer))


async def _ask(address: str) -> _Answer:
    async with OutriderClient(address, client_options()) as client:
        return await client.model_info(), *(await client.whole_status())


async def _watch(address: str, interval_s: float, *, as_json: bool) -> None:
    """Look until cancelled: redraw a terminal, write one answer after the other elsewhere."""
    console = Console(highlight=False)
    if as_json or not console.is_terminal:
        while True:
            await _write(address, console, as_json=as_json)
            await asyncio.sleep(interval_s)
    shown = Group(Text(f"asking {address}"))
    with Live(shown, console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                shown = Group(status_screen(*await _ask(address)))
                live.update(shown, refresh=True)
            except OutriderError as error:
                # The last screen stays, with the reason below it.
                live.update(Group(shown, Text(f"no answer: {error}")), refresh=True)
            await asyncio.sleep(interval_s)


async def _write(address: str, console: Console, *, as_json: bool) -> None:
    try:
        answer = await _ask(address)
    except OutriderError as error:
        messages.print(f"no answer: {error}", markup=False, soft_wrap=True)
        return
    if as_json:
        typer.echo(_json(answer))
    else:
        console.print(status_screen(*answer))


def _json(answer: _Answer) -> str:
    model, engines, fleet = answer
    whole = {"model": asdict(model), "engines": [asdict(one) for one in engines], **asdict(fleet)}
    return json.dumps(whole, default=lambda one: one.value)
