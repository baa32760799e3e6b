"""One benchmark from start to end: on a local stack, on a deployment, or on the scripted engine alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from outrider.core.generation import ChatMessage
from outrider.engine.base import ModelEngine
from outrider.engine.config import EngineConfig
from outrider.engine.factory import build_engine, torch_dtype
from outrider.engine.models.prepare import Progress
from outrider.engine.models.resolve import resolve
from outrider.local.bench.accounting import account_steps
from outrider.local.bench.cpu_clock import ThreadCpuClock
from outrider.local.bench.generators import Generators
from outrider.local.bench.load import requests_of, run_load
from outrider.local.bench.off_cost import OffCost, measure_off_cost
from outrider.local.bench.paired import Meter, run_paired
from outrider.local.bench.peer_process import PeerProcess, PeerSpec
from outrider.local.bench.plan import BenchPlan, Mode, Piece
from outrider.local.bench.prompts import Prompt
from outrider.local.bench.result import BenchResult
from outrider.local.bench.versions import versions
from outrider.local.bench.widths import WidthShares, measure_widths
from outrider.local.codec import Codec, check_vocabularies, load_codec
from outrider.local.config import SELF_DRAFT, LocalSettings, scripted_settings
from outrider.local.draft_handle import LocalDraft
from outrider.local.stack import LocalStack, silent, start_draft
from outrider.local.threads import run_in_thread
from outrider.rpc.client import OutriderClient

__all__ = ["LocalExtras", "longest_prompt", "run_accounting", "run_local", "run_remote"]

_ACCOUNTED_SEQS = (1, 64)
_SCRIPTED_AGREEMENT = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalExtras:
    """What a local run measures besides the paired runs."""

    width_rounds: int = 20
    """Forwards per width beside the bandwidth bound; 0 leaves it out."""
    off_runs: int = 5
    """Runs of each kind for the cost of speculation that is gated off; 0 leaves it out."""
    prompt_lookup_tokens: int | None = None
    """The peer's assisted mode looks prompts up instead of using an assistant."""


async def run_accounting(*, max_tokens: int = 128, off_runs: int = 15) -> BenchResult:
    """CPU time per step on the scripted engine, plain and speculating, greedy and sampling, at 1 and 64 sequences.

    With `off_runs` also what speculation costs when it is gated off.
    """
    costs = [
        await account_steps(num_seqs=num_seqs, speculates=speculates, temperature=temperature, max_tokens=max_tokens)
        for num_seqs in _ACCOUNTED_SEQS
        for temperature in (0.0, 1.0)
        for speculates in (False, True)
    ]
    off_cost = None
    if off_runs:
        settings = scripted_settings(draft_agreement=_SCRIPTED_AGREEMENT, num_seqs=1, max_model_len=max_tokens + 64)
        async with _parts(settings, silent) as (engine, codec, draft):
            work = _OffWork(prompt=Prompt(text="How far is it?"), max_tokens=max_tokens, runs=off_runs)
            off_cost = await _off_cost(work, settings, engine, codec, draft)
    return BenchResult(
        dtype="float64",
        threads=1,
        draft="scripted",
        accounting=tuple(costs),
        off_cost=off_cost,
        versions=versions(),
    )


async def run_remote(plan: BenchPlan, address: str, meter: Meter) -> BenchResult:
    """Measure a running deployment through its public API. Number format and threads are its own matter.

    Every prompt is sent once beforehand, so that a prefix cache helps all modes alike.
    """
    async with OutriderClient(address) as client:
        for cell in plan.cells():
            piece = Piece(prompts=cell.prompts, concurrency=1, request_rate=None, seed=0)
            await run_load(client, piece, requests_of(piece, speculates=False, max_tokens=1))
        with Generators(client, max_tokens=plan.max_tokens) as generators:
            cells = await run_paired(plan, generators.generate, meter)
    return BenchResult(
        dtype=None,
        threads=None,
        cells=tuple(cells),
        notes=("Prompts had been sent before: the time to first token is that of cached prompts.",),
        versions=versions(),
    )


def longest_prompt(plan: BenchPlan, config: EngineConfig, progress: Progress) -> int:
    """Tokens of the plan's longest prompt, so that KV can be sized."""
    codec = load_codec(config, progress)
    turns = [ChatMessage(role="user", content=prompt.text) for cell in plan.cells() for prompt in cell.prompts]
    return max(len(codec.encode_chat([turn], continue_final_message=False)) for turn in turns)


async def run_local(
    plan: BenchPlan, settings: LocalSettings, extras: LocalExtras, meter: Meter, progress: Progress
) -> BenchResult:
    """Build everything in this process, measure it, and end it. Raises `OutriderError`s."""
    async with _parts(settings, progress) as (engine, codec, draft):
        widths = None
        if extras.width_rounds and settings.target.kind == "torch":
            progress("measuring the bandwidth bound")
            # In a thread that ends: one that stayed would keep its team of compute threads.
            widths = await run_in_thread(partial(_widths, engine, settings.target, extras.width_rounds))
        stack = LocalStack(settings, engine=engine, codec=codec, draft=draft)
        try:
            await stack.start()
            async with _peer(plan, settings, extras, progress) as peer:
                with Generators(stack, max_tokens=plan.max_tokens, peer=peer, codec=codec) as generators:
                    await _warm_up(plan, generators)
                    cells = await run_paired(plan, generators.generate, meter)
        finally:
            await stack.close()
        off_cost = None
        if extras.off_runs and settings.proposes:
            progress("measuring the cost of speculation that is gated off")
            prompt = plan.cells()[0].prompts[0]
            work = _OffWork(prompt=prompt, max_tokens=plan.max_tokens, runs=extras.off_runs)
            off_cost = await _off_cost(work, settings, engine, codec, draft)
    return BenchResult(
        dtype=settings.target.dtype,
        threads=settings.target.threads,
        draft=_draft_name(settings),
        num_draft_tokens=settings.gate.max_num_draft_tokens if settings.proposes else None,
        cells=tuple(cells),
        widths=widths,
        off_cost=off_cost,
        notes=_notes(plan),
        versions=versions(),
    )


@asynccontextmanager
async def _parts(
    settings: LocalSettings, progress: Progress
) -> AsyncIterator[tuple[ModelEngine, Codec, LocalDraft | None]]:
    """Engine, tokenizer and draft, for several stacks in turn."""
    if settings.draft is not None:
        await asyncio.to_thread(check_vocabularies, settings.target, settings.draft, progress)
    codec = await asyncio.to_thread(load_codec, settings.target, progress)
    engine = await asyncio.to_thread(build_engine, settings.target, progress)
    try:
        draft = await start_draft(settings, progress)
        try:
            yield engine, codec, draft
        finally:
            if draft is not None:
                await draft.stop()
    finally:
        engine.close()


def _widths(engine: ModelEngine, config: EngineConfig, rounds: int) -> WidthShares:
    from outrider.engine.bandwidth import WeightReader, weight_bytes

    folder = resolve(config.model, config.cache_dir, silent)
    reader = WeightReader(weight_bytes(folder, torch_dtype(config)), threads=config.threads)
    return measure_widths(engine, reader, rounds=rounds)


@asynccontextmanager
async def _peer(
    plan: BenchPlan, settings: LocalSettings, extras: LocalExtras, progress: Progress
) -> AsyncIterator[PeerProcess | None]:
    if not any(mode.is_peer for mode in plan.modes):
        yield None
        return
    progress("loading the model in transformers")
    target = settings.target
    assistant = None
    if Mode.HF_ASSISTED in plan.modes and settings.draft is not None:
        assistant = resolve(settings.draft.model, settings.draft.cache_dir, progress)
    spec = PeerSpec(
        folder=resolve(target.model, target.cache_dir, progress),
        target=target,
        assistant=assistant,
        prompt_lookup_tokens=extras.prompt_lookup_tokens if Mode.HF_ASSISTED in plan.modes else None,
    )
    peer = PeerProcess(spec)
    try:
        await asyncio.to_thread(peer.load)
        yield peer
    finally:
        peer.close()


async def _warm_up(plan: BenchPlan, generators: Generators) -> None:
    """One short run in every mode: what is made once is not measured."""
    cell = plan.cells()[0]
    piece = Piece(prompts=cell.prompts[:1], concurrency=1, request_rate=None, seed=0)
    for mode in plan.modes:
        await generators.generate(mode, piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OffWork:
    prompt: Prompt
    max_tokens: int
    runs: int


async def _off_cost(
    work: _OffWork, settings: LocalSettings, engine: ModelEngine, codec: Codec, draft: LocalDraft | None
) -> OffCost:
    """Two more stacks on the same engine, whose threads count CPU time."""
    alone = replace(settings, draft=None, loop=replace(settings.loop, prompt_lookup_max=0))
    configured = LocalStack(settings, engine=engine, codec=codec, draft=draft, clock=ThreadCpuClock())
    unconfigured = LocalStack(alone, engine=engine, codec=codec, draft=None, clock=ThreadCpuClock())
    try:
        await configured.start()
        await unconfigured.start()
        piece = Piece(prompts=(work.prompt,), concurrency=1, request_rate=None, seed=0)
        return await measure_off_cost(configured, unconfigured, piece, max_tokens=work.max_tokens, runs=work.runs)
    finally:
        await configured.close()
        await unconfigured.close()


def _draft_name(settings: LocalSettings) -> str | None:
    if settings.draft is None:
        return "ngram" if settings.loop.prompt_lookup_max else None
    return SELF_DRAFT if settings.draft.quantization == "int4" else settings.draft.model


def _notes(plan: BenchPlan) -> tuple[str, ...]:
    notes = []
    if plan.request_rate is not None:
        notes.append("Open loop: tokens per second follow the arrivals; look at the latencies.")
    if Mode.HF_ASSISTED in plan.modes:
        notes.append("transformers assists with its own default settings, as it ships.")
    return tuple(notes)
