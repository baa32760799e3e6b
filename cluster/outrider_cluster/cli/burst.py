"""`outrider burst`: what gate and autoscaler make of a burst, on a fleet that is not here."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.core.errors import ConfigError
from outrider_cluster.cli.terminal import errors_as_exit_codes, fail, messages

if TYPE_CHECKING:
    from outrider.emulation.burst import BurstResult

__all__ = ["burst"]


def burst(
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the course of it to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot of it to this SVG file.")] = None,
    streams: Annotated[int, typer.Option(min=1, help="Streams of the burst.")] = 100,
    calm: Annotated[int, typer.Option(min=0, help="Streams before and after it.")] = 6,
    engines: Annotated[int, typer.Option(min=1, help="Most target replicas.")] = 4,
    per_engine: Annotated[float, typer.Option(help="Sequences that an engine shall have.")] = 28.0,
    seats: Annotated[int, typer.Option(min=1, help="Most sequences in the batch of an engine.")] = 64,
    threshold: Annotated[int, typer.Option(min=0, help="Batch size above which the gate is off.")] = 32,
    seconds: Annotated[float, typer.Option(help="Length of the burst; it is calm before it and after it.")] = 240.0,
    slowdown: Annotated[float, typer.Option(help="Devices are so many times slower, for fewer steps.")] = 10.0,
) -> None:
    """Emulate a burst in virtual time: first the gate closes, then engines come, then both go back.

    Fails when a request fails, a text is wrong or a step speculates above the threshold.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with errors_as_exit_codes():
        from outrider.core.load import LoadTargets
        from outrider.core.policy import GateSettings
        from outrider.emulation.autoscaler import ScalingSettings
        from outrider.emulation.burst import BurstSettings, Phase, run_burst
        from outrider.emulation.burst_chart import burst_chart

        for file in (as_json, plot):
            if file is not None and not file.parent.is_dir():
                raise ConfigError(f"{file}: the folder does not exist")
        settings = BurstSettings(
            phases=(
                Phase(seconds=60, streams=calm),
                Phase(seconds=seconds, streams=streams),
                Phase(seconds=180, streams=calm),
            ),
            scaling=ScalingSettings(max_replicas=engines, targets=LoadTargets(sequences=per_engine)),
            gate=GateSettings(mode=None, batch_size_threshold=threshold),
            max_num_seqs=seats,
            slowdown=slowdown,
        )
        with messages.status("emulating"):
            result = run_burst(settings)
        if as_json is not None:
            as_json.write_text(json.dumps({"emulated": True, **asdict(result)}, indent=1) + "\n")
        if plot is not None:
            title = f"A burst from {calm} to {streams} streams on emulated Llama-70B engines, {slowdown:g} times slowed"
            plot.write_text(burst_chart(result.moments, settings, title))
        _show(result)


def _show(result: "BurstResult") -> None:
    most = max(one.ready for one in result.moments)
    messages.print(
        f"{result.requests} requests on 1 to {most} engines, {result.steps} steps: {result.failed} failed, "
        f"{result.wrong} wrong texts, {result.late_gate_steps} steps that speculated above the threshold"
    )
    if result.failed or result.wrong or result.late_gate_steps:
        fail("the burst has cost something")
