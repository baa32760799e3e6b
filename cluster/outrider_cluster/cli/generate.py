"""`outrider generate`: one request, streamed to the terminal."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Annotated, Literal

import typer

from outrider.core.generation import ChatMessage, GenerationEvent, GenerationRequest, TextDelta
from outrider.core.speculation import SpeculationChoice, SpeculationPreference
from outrider.rpc.client import OutriderClient
from outrider_cluster.cli.calling import client_options
from outrider_cluster.cli.report import as_json, summary_of
from outrider_cluster.cli.terminal import errors_as_exit_codes, messages

__all__ = ["generate"]


def generate(
    address: Annotated[str, typer.Option(help="HOST:PORT of the gRPC ingress.")],
    prompt: Annotated[str, typer.Option(help="What to continue.")],
    max_tokens: Annotated[int, typer.Option(help="Most output tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes the output reproducible.")] = None,
    speculation: Annotated[Literal["auto", "off", "on"], typer.Option(help="Wish about speculation.")] = "auto",
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's turn of a conversation.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on when the stream breaks.")] = True,
    as_json_lines: Annotated[bool, typer.Option("--json", help="One JSON object per message.")] = False,
) -> None:
    """Generate text and show it as it comes."""
    request = GenerationRequest(
        text=None if chat else prompt,
        messages=(ChatMessage(role="user", content=prompt),) if chat else None,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        speculation=SpeculationChoice(preference=SpeculationPreference(speculation)),
    )
    with errors_as_exit_codes():
        asyncio.run(_run(address, request, resume=resume, show=_show_json if as_json_lines else _show_text))


async def _run(
    address: str, request: GenerationRequest, *, resume: bool, show: Callable[[GenerationEvent], None]
) -> None:
    async with (
        OutriderClient(address, client_options()) as client,
        aclosing(client.stream(request, resume=resume)) as events,
    ):
        await _show_all(events, show)


async def _show_all(events: AsyncIterator[GenerationEvent], show: Callable[[GenerationEvent], None]) -> None:
    async for event in events:
        show(event)


def _show_json(event: GenerationEvent) -> None:
    typer.echo(json.dumps(as_json(event), ensure_ascii=False))


def _show_text(event: GenerationEvent) -> None:
    if isinstance(event, TextDelta):
        sys.stdout.write(event.text)
        sys.stdout.flush()
    elif (summary := summary_of(event)) is not None:
        sys.stdout.write("\n")
        sys.stdout.flush()
        messages.print(summary, style="dim", markup=False, soft_wrap=True)
