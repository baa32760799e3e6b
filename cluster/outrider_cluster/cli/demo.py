"""`outrider demo`: the whole deployment on this machine, the same prompts with speculation on and off."""

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.core.errors import EngineUnavailable
from outrider.core.generation import ChatMessage, GenerationRequest
from outrider.core.speculation import SpeculationChoice, SpeculationPreference
from outrider.engine.models.catalogue import is_packaged
from outrider.engine.models.heads import is_head
from outrider.engine.models.prepare import prepare
from outrider.rpc.client import OutriderClient
from outrider_cluster.cli.demo_report import DemoRow, as_json, as_table
from outrider_cluster.cli.measured import Measurement, measure_engine, measure_request
from outrider_cluster.cli.terminal import errors_as_exit_codes, fail, messages, progress
from outrider_cluster.codec import Codec, target_codec
from outrider_cluster.reaper import no_process_left
from outrider_cluster.sections import SELF_DRAFT
from outrider_cluster.settings import Environment, Settings, default_settings, load_settings, prepare_environment
from outrider_cluster.stopping import StopSignals

__all__ = ["demo"]

_DRAFT_TIMEOUT_S = 180.0
_ASK_AGAIN_S = 0.25
_SEED = 7

_SELF_DRAFT_NOTE = (
    "The draft is the target's own weights in four bits: that shows the mechanism. Its acceptance says nothing "
    "about a realistic pair, where a smaller model of the same family drafts."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    name: str
    text: str
    temperature: float


_PROMPTS = (
    _Prompt(name="code", text="Write a Python function that returns the n-th Fibonacci number.", temperature=0.0),
    _Prompt(name="explanation", text="Explain in a few sentences why the sky is blue.", temperature=0.8),
    _Prompt(
        name="repetition",
        text=(
            "Please copy the following text exactly: The train leaves the old station at nine and arrives in the "
            "small town by the sea before noon. The children run down to the beach, and their parents carry the "
            "bags to the hotel."
        ),
        temperature=0.0,
    ),
)


def demo(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results there as JSON.")] = None,
    config: Annotated[Path | None, typer.Option(help="Another configuration than the laptop's; needs a draft.")] = None,
    draft: Annotated[str | None, typer.Option(help="Another draft: self, or a model such as smollm2-draft.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Output tokens per prompt.")] = 64,
) -> None:
    """Stream three prompts with and without speculation, compare texts and speeds, leave nothing behind."""
    console = Console(highlight=False)
    with no_process_left(), StopSignals() as signals, errors_as_exit_codes():
        settings = default_settings() if config is None else load_settings(config)
        if draft is not None:
            settings = _with_draft(settings, draft)
        if settings.active_draft is None:
            fail("the demo compares with a draft, and this configuration has none")
        if settings.active_draft.method == "eagle3" or is_head(settings.active_draft.model):
            fail("the demo also runs the draft alone, which a head cannot: use outrider serve, or bench --draft")
        prepare_environment(settings)
        environment = Environment.read()
        for name in (settings.model.name, settings.active_draft.model):
            if is_packaged(name):
                prepare(name, environment.cache_dir, progress)
        # Imports Ray, which reads the environment.
        from outrider_cluster.draft_alone import start_draft_alone
        from outrider_cluster.service import running_service

        with running_service(settings, progress, signals) as service:
            progress("starting the draft model as an engine of its own, for comparison")
            _alive, draft_address = start_draft_alone(settings)
            codec = target_codec(settings, environment, progress)
            rows = asyncio.run(_run(service.ingress.grpc_address, draft_address, codec, max_tokens))
        console.print(as_table(rows))
        if settings.active_draft.model == SELF_DRAFT:
            console.print(_SELF_DRAFT_NOTE)
        _finish(rows, json_file)


def _with_draft(settings: Settings, model: str) -> Settings:
    """The same with another draft model; the target's own weights draft in four bits, others as they are."""
    if settings.draft is None:
        return settings
    quantization = "int4" if model == SELF_DRAFT else "none"
    other = settings.draft.model_copy(update={"model": model, "quantization": quantization})
    return settings.model_copy(update={"draft": other})


def _finish(rows: list[DemoRow], json_file: Path | None) -> None:
    report = as_json(rows)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if not report["texts_equal"]:
        fail("speculation changed a text")


async def _run(address: str, draft_address: str, codec: Codec, max_tokens: int) -> list[DemoRow]:
    async with OutriderClient(address) as client:
        await _wait_for_draft(client)
        return [await _row(client, draft_address, codec, prompt, max_tokens) for prompt in _PROMPTS]


async def _row(client: OutriderClient, draft_address: str, codec: Codec, prompt: _Prompt, max_tokens: int) -> DemoRow:
    messages.print(f"\n[bold]{prompt.name}[/bold]: {prompt.text} (temperature {prompt.temperature:g})")
    on = await _shown(client, prompt, SpeculationPreference.ON, max_tokens)
    off = await _shown(client, prompt, SpeculationPreference.OFF, max_tokens)
    ids = codec.encode_chat([ChatMessage(role="user", content=prompt.text)], continue_final_message=False)
    alone = await measure_engine(draft_address, ids, max_tokens=max_tokens, temperature=prompt.temperature)
    return DemoRow(name=prompt.name, prompt=prompt.text, on=on, off=off, draft_alone_tokens_per_s=alone)


async def _shown(
    client: OutriderClient, prompt: _Prompt, preference: SpeculationPreference, max_tokens: int
) -> Measurement:
    request = GenerationRequest(
        messages=(ChatMessage(role="user", content=prompt.text),),
        max_tokens=max_tokens,
        temperature=prompt.temperature,
        seed=_SEED,
        speculation=SpeculationChoice(preference=preference),
    )
    messages.print(f"speculation {preference.value}:", style="dim")
    measured = await measure_request(client, request, _show)
    _show("\n")
    return measured


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


async def _wait_for_draft(client: OutriderClient) -> None:
    """The service is ready without its draft; what is shown here needs it."""
    progress("waiting for the draft")
    try:
        async with asyncio.timeout(_DRAFT_TIMEOUT_S):
            while not await _draft_is_connected(client):  # noqa: ASYNC110 - the other end is another process
                await asyncio.sleep(_ASK_AGAIN_S)
    except TimeoutError:
        raise EngineUnavailable(f"no draft has connected within {_DRAFT_TIMEOUT_S:g} s") from None


async def _draft_is_connected(client: OutriderClient) -> bool:
    return any(link.connected for engine in await client.speculation_status() for link in engine.draft_links)
