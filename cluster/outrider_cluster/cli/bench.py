"""`outrider bench`: how fast, against what, and whether speculation pays."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.core.errors import ConfigError
from outrider_cluster.cli.terminal import errors_as_exit_codes, messages, progress
from outrider_cluster.stopping import StopSignals

if TYPE_CHECKING:
    from outrider.local.bench.paired import Meter
    from outrider.local.bench.plan import BenchPlan
    from outrider.local.bench.result import BenchResult

__all__ = ["bench"]

_FILE_WIDTH = 160


Engine = Annotated[
    Literal["torch", "scripted"], typer.Option(help="scripted: the CPU time of the engine loop alone, no model.")
]
Draft = Annotated[
    str,
    typer.Option(
        help="self: the target in four bits; ngram; none; or a model or head (smollm2-draft, smollm2-eagle3)."
    ),
]
DType = Annotated[Literal["fp32", "bf16", "float32", "bfloat16"], typer.Option(help="Of every model.")]
DraftThreads = Annotated[int | None, typer.Option(help="Compute threads of the draft; default: --threads.")]
How = Annotated[Literal["sequential", "cached", "auto"], typer.Option("--mode", help="How blocks are obtained.")]
Sets = Annotated[str, typer.Option(help="Of code, chat, summarise, creative, mixed; comma-separated.")]
PromptFile = Annotated[
    Path | None, typer.Option(help="A .jsonl file of prompts or a JSON file in ShareGPT's format instead.")
]
Rate = Annotated[float | None, typer.Option(help="Requests per second, Poisson, instead of --concurrency.")]
NumPrompts = Annotated[int, typer.Option(help="Prompts per set and load; at least one per stream is taken.")]
Modes = Annotated[
    str | None, typer.Option(help="Of plain, speculative, hf_plain, hf_assisted; default: all that apply.")
]


def bench(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there as JSON.")] = None,
    engine: Engine = "torch",
    address: Annotated[str | None, typer.Option(help="Measure the deployment at HOST:PORT instead.")] = None,
    model: Annotated[str, typer.Option(help="The target model.")] = "smollm2-135m",
    draft: Draft = "self",
    dtype: DType = "bf16",
    threads: Annotated[int, typer.Option(help="Compute threads of the target and of the peer.")] = 1,
    draft_threads: DraftThreads = None,
    k: Annotated[int, typer.Option("--k", help="Draft tokens a round.")] = 5,
    mode: How = "sequential",
    prompt_sets: Sets = "code,chat,summarise,creative",
    prompts: PromptFile = None,
    concurrency: Annotated[str, typer.Option(help="Streams at once, comma-separated.")] = "1",
    request_rate: Rate = None,
    num_prompts: NumPrompts = 4,
    max_tokens: Annotated[int, typer.Option(help="Most output tokens of a prompt.")] = 64,
    repeats: Annotated[int, typer.Option(help="Repeats, for the spread.")] = 3,
    modes: Modes = None,
    peer: Annotated[Literal["hf"] | None, typer.Option(help="Compare with transformers' generate.")] = None,
    width_rounds: Annotated[int, typer.Option(help="Forwards beside the bandwidth bound; 0: not measured.")] = 20,
    off_runs: Annotated[int, typer.Option(help="Runs of speculation gated off; 0: not measured.")] = 5,
) -> None:
    """Measure speed, paired with plain decoding in the same run; advise from what was measured."""
    # Read when torch is loaded; threads that spin beside each other slow one another down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with StopSignals(), errors_as_exit_codes():
        if json_file is not None and not json_file.parent.is_dir():
            raise ConfigError(f"{json_file}: the folder does not exist")
        from outrider.local.bench.session import LocalExtras, run_accounting, run_local, run_remote
        from outrider_cluster.cli.bench_options import NGRAM, LoadOptions, PairOptions

        if engine == "scripted":
            progress("counting the CPU time of steps on the scripted engine")
            _finish(asyncio.run(run_accounting(max_tokens=max_tokens, off_runs=3 * off_runs)), json_file)
            return
        plan = LoadOptions(
            prompt_sets=prompt_sets,
            prompt_file=prompts,
            concurrency=concurrency,
            request_rate=request_rate,
            num_prompts=num_prompts,
            max_tokens=max_tokens,
            repeats=repeats,
        ).plan(modes, draft=draft, peer=peer, remote=address is not None)
        if address is not None:
            with _bar(plan) as meter:
                result = asyncio.run(run_remote(plan, address, meter))
        else:
            pair = PairOptions(model=model, draft=draft, dtype=dtype, threads=threads, draft_threads=draft_threads)
            settings = pair.settings(plan, k=k, mode=mode, progress=progress)
            extras = LocalExtras(
                width_rounds=width_rounds, off_runs=off_runs, prompt_lookup_tokens=k if draft == NGRAM else None
            )
            with _bar(plan) as meter:
                result = asyncio.run(run_local(plan, settings, extras, meter, progress))
        _finish(result, json_file)


def _finish(result: "BenchResult", json_file: Path | None) -> None:
    from outrider.local.bench.report import report_as_json
    from outrider_cluster.cli.bench_table import show_bench

    console = Console(highlight=False)
    # Into a file or a pipe nothing needs to be folded.
    show_bench(result, console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH))
    if json_file is not None:
        json_file.write_text(json.dumps(report_as_json(result), indent=2) + "\n", encoding="utf-8")


@contextmanager
def _bar(plan: "BenchPlan") -> "Iterator[Meter]":
    """A progress bar on a terminal; nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages, disable=not messages.is_terminal, transient=True) as bar:
        task = bar.add_task("loading", total=plan.num_pieces)
        begun = False

        def meter(label: str) -> None:
            nonlocal begun
            bar.update(task, description=label, advance=1 if begun else 0)
            begun = True

        yield meter
