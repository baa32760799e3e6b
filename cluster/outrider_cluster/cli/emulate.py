"""`outrider emulate`: what speculation would bring on hardware that is not here."""

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from outrider.core.errors import ConfigError
from outrider_cluster.cli.lists import listed
from outrider_cluster.cli.terminal import errors_as_exit_codes, progress

__all__ = ["emulate"]

_PIPE_WIDTH = 140
_JOBS = os.cpu_count() or 1


def emulate(
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write speed-up against batch size to this SVG file.")] = None,
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,2,4,8,16,32,64,128",
    alphas: Annotated[str, typer.Option(help="Acceptance rates, comma-separated.")] = "0.4,0.65,0.78,0.85",
    modes: Annotated[str, typer.Option(help="Of plain, sequential, cached, auto.")] = "plain,sequential,cached,auto",
    clock: Annotated[
        Literal["virtual", "wall"],
        typer.Option(help="virtual: software is free and noise absent; wall: real time, real gRPC, real waits."),
    ] = "virtual",
    k: Annotated[int, typer.Option("--k", help="Draft tokens a round; auto chooses its own.")] = 7,
    branches: Annotated[int, typer.Option(help="Outcomes of a sequence drafted for; auto chooses its own.")] = 24,
    steps: Annotated[int | None, typer.Option(help="Measured engine steps of each run.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes of a virtual sweep.")] = _JOBS,
) -> None:
    """Compare plain, sequential, cached and self-tuned decoding of a 70B with a 1B draft, emulated.

    Only the forward passes are emulated; loop, gate, drafter and protocol are the real ones.
    """
    # Read when torch is loaded: threads that share so little work only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with errors_as_exit_codes():
        from outrider.emulation.chart import speedup_chart
        from outrider.emulation.harness import EmulationMode
        from outrider.emulation.report import report_as_json
        from outrider.emulation.sweep import Sweep, run_sweep
        from outrider_cluster.cli.emulation_table import sweep_table, sweep_title

        sweep = Sweep(
            batches=listed("--batches", batches, int),
            acceptances=listed("--alphas", alphas, float),
            modes=listed("--modes", modes, EmulationMode),
            k=k,
            branches=branches,
            steps=steps,
        )
        for file in (as_json, plot):
            if file is not None and not file.parent.is_dir():
                raise ConfigError(f"{file}: the folder does not exist")
        rows = []
        for row in run_sweep(sweep, clock=clock, jobs=min(jobs, len(sweep))):
            rows.append(row)
            progress(f"{len(rows)}/{len(sweep)}  batch {row.batch}, acceptance {row.alpha:g}, {row.mode}")
        if as_json is not None:
            as_json.write_text(json.dumps(report_as_json(sweep, rows, clock=clock), indent=2) + "\n")
        if plot is not None:
            plot.write_text(speedup_chart(rows, sweep_title(sweep, clock)))
        _console().print(sweep_table(sweep, rows, clock))


def _console() -> Console:
    """The terminal; a pipe has no width of its own, and what reads it can scroll."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)
