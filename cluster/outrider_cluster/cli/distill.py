"""`outrider distill`: make a draft for a target from the target's own answers."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from outrider.core.errors import ConfigError
from outrider_cluster.cli.stages import stages_shown
from outrider_cluster.cli.terminal import errors_as_exit_codes, messages, progress
from outrider_cluster.settings import Environment
from outrider_cluster.stopping import StopRequested, StopSignals

if TYPE_CHECKING:
    from outrider.distill.evaluation import ClassAcceptance
    from outrider.distill.prompts import Conversation

__all__ = ["distill"]

_SETS = "code,chat"
_FEWEST_PROMPTS = 4
"""Of a set; a run of more minutes measures on more of them."""

Output = Annotated[Path, typer.Option(help="The draft's folder; run again with it to go on where a run stopped.")]
Method = Annotated[
    Literal["draft_model", "eagle3"], typer.Option(help="A small model, or a head on the target's features.")
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        help='A .jsonl file of {"prompt"} or logged {"messages"}, or a JSON file in ShareGPT\'s format; '
        "without: made up by the target."
    ),
]
HeldOut = Annotated[str, typer.Option(help="Prompt sets that acceptance is measured on, comma-separated; or none.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Of a draft model; they start from the target's. Default: 4.")]
HiddenSize = Annotated[
    int | None,
    typer.Option(min=1, help="Channels of a draft model; fewer than the target's means layers from scratch."),
]
DType = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of sampling and evaluation.")]


def distill(
    output: Output,
    target: Annotated[str, typer.Option(help="The target model.")] = "smollm2-135m",
    prompts: PromptFile = None,
    minutes: Annotated[float, typer.Option(help="For everything, about.")] = 60.0,
    method: Method = "draft_model",
    layers: Layers = None,
    hidden_size: HiddenSize = None,
    vocabulary: Annotated[int, typer.Option(min=1, help="Ids that the draft can propose.")] = 5120,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a sampled answer.")] = 112,
    slots: Annotated[int, typer.Option(min=1, help="Texts sampled at once.")] = 64,
    held_out: HeldOut = _SETS,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    dtype: DType = "bfloat16",
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads; default: all cores.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, texts and training.")] = 1,
) -> None:
    """Sample a target's answers, train a draft on them, measure its acceptance. Stages resume."""
    threads = threads or os.cpu_count() or 1
    # Read when torch is loaded; threads that spin beside others' work slow everything down.
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with StopSignals(), errors_as_exit_codes(), _words_at_a_stop():
        if not minutes > 0:
            raise ConfigError(f"--minutes: {minutes} is not above 0")
        from outrider.distill.pipeline import distill as run
        from outrider.distill.settings import DistillSettings, StageMinutes

        settings = DistillSettings(
            target=target,
            output=output,
            minutes=StageMinutes.of_total(minutes),
            method=method,
            prompts=() if prompts is None else _conversations(prompts),
            held_out=_held_out(held_out, count=max(_FEWEST_PROMPTS, int(minutes))),
            device=device,
            dtype=dtype,
            threads=threads,
            num_layers=layers,
            hidden_size=hidden_size,
            vocabulary_size=vocabulary,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_tokens,
            num_slots=slots,
            seed=seed,
            cache_dir=Environment.read().cache_dir,
            command=shlex.join(["outrider", *sys.argv[1:]]),
        )
        with stages_shown(messages) as listen:
            report = run(settings, listen, progress)
        _show(report.acceptance)
        typer.echo(report.folder)
        progress(f"to see what it brings: outrider bench --draft {shlex.quote(str(report.folder.resolve()))}")


@contextmanager
def _words_at_a_stop() -> Iterator[None]:
    """A run that was stopped is no success for what waits behind it, and can be resumed."""
    try:
        yield
    except StopRequested as stop:
        progress(f"stopped by {stop}; the same command goes on from here")
        raise typer.Exit(128 + signal.Signals[str(stop)]) from stop


def _conversations(path: Path) -> "tuple[Conversation, ...]":
    """What a file asks, by its kind; says what of it cannot be read. Raises `ConfigError` naming the file."""
    from outrider.distill.prompts import load_conversations, user_turn
    from outrider.local.bench.prompts import load_prompt_file

    if path.suffix == ".jsonl":
        read = load_conversations(path)
        if read.num_refused:
            progress(f"prompts: lines left out: {read.num_refused}, the first is {read.first_refused}")
        return read.conversations
    return tuple(user_turn(one.text) for one in load_prompt_file(path).prompts)


def _held_out(names: str, count: int) -> dict[str, tuple[str, ...]]:
    """At most `count` prompts of each of those sets, by name. Raises `ConfigError` naming the known ones."""
    from outrider.local.bench.prompts import load_prompt_sets, prompt_folder

    if names == "none":
        return {}
    sets = load_prompt_sets([name.strip() for name in names.split(",")], prompt_folder())
    return {one.name: tuple(prompt.text for prompt in one.prompts[:count]) for one in sets}


def _show(acceptance: "tuple[ClassAcceptance, ...]") -> None:
    if not acceptance:
        return
    table = Table(title="acceptance on held-out prompts")
    for name in ("prompts", "T", "first", "by position", "tokens a round", "by ratio"):
        table.add_column(name, no_wrap=True)
    for one in acceptance:
        table.add_row(
            one.name,
            f"{one.temperature:g}",
            f"{one.first:.3f}",
            " ".join(f"{share:.2f}" for share in one.per_position),
            f"{one.mean_length:.2f}",
            "–" if one.rejection is None else f"{one.rejection:.3f}",
        )
    Console(highlight=False).print(table)
