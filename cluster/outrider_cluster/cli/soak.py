"""`outrider soak`: many streams with random aborts, then a check for leaks and for every text."""

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.core.errors import ConfigError
from outrider_cluster.cli.terminal import errors_as_exit_codes, fail, messages, progress
from outrider_cluster.settings import Environment
from outrider_cluster.stopping import StopSignals

if TYPE_CHECKING:
    from outrider.local.soak.session import SoakReport

__all__ = ["soak"]


def soak(
    seconds: Annotated[float, typer.Option(help="How long streams are kept busy.")] = 300.0,
    engine: Annotated[Literal["torch", "scripted"], typer.Option(help="scripted: the formula model.")] = "torch",
    model: Annotated[str, typer.Option(help="The target model.")] = "smollm2-135m",
    draft: Annotated[str, typer.Option(help="self: the target in four bits; none; or a draft model.")] = "self",
    streams: Annotated[int, typer.Option(help="Streams at once.")] = 64,
    cases: Annotated[int, typer.Option(help="Different requests; each is run alone afterwards.")] = 48,
    threads: Annotated[int, typer.Option(help="Compute threads of the target.")] = 1,
    seed: Annotated[int, typer.Option(help="Of requests, order and aborts.")] = 1,
) -> None:
    """Fail when something leaks, grows, gets stuck, or gives another text than it gives alone.

    A quarter of the requests is aborted somewhere; slow readers and malformed requests are mixed in.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with StopSignals(), errors_as_exit_codes():
        if not seconds > 0:
            raise ConfigError(f"--seconds: {seconds} is not above 0")
        from outrider.local.bench.prompts import MIXED, load_prompt_sets, prompt_folder
        from outrider.local.soak.presets import model_soak, scripted_soak
        from outrider.local.soak.session import SoakLoad, run_soak
        from outrider.local.soak.streams import for_seconds

        if engine == "scripted":
            settings, catalogue = scripted_soak(num_streams=streams, cases=cases, seed=seed)
        else:
            (mixed,) = load_prompt_sets([MIXED], prompt_folder())
            settings, catalogue = model_soak(
                [one.text for one in mixed.prompts],
                model=model,
                draft=None if draft == "none" else draft,
                num_streams=streams,
                threads=threads,
                cases=cases,
                cache_dir=Environment.read().cache_dir,
                seed=seed,
            )
        with messages.status("loading") as status:
            start = partial(for_seconds, seconds)
            load = SoakLoad(catalogue=catalogue, start=start, num_streams=streams, seed=seed)
            report = asyncio.run(run_soak(settings, load, status.update, progress))
        _show(report)


def _show(report: "SoakReport") -> None:
    from outrider.local.soak.memory import TOO_SHORT

    messages.print(
        f"{report.tally}; {report.tally.tokens} tokens, {report.tally.speculative_rounds} speculative rounds, "
        f"{report.preemptions} preemptions"
    )
    messages.print(f"every text compared with its solo run: {len(report.divergences)} kinds differ")
    for line in (*report.divergences, *report.leaks, *report.tally.not_refused, *report.memory):
        messages.print(str(line), markup=False)
    if not report.passed:
        fail("the soak test has failed")
    if report.memory_judged:
        messages.print("nothing leaked or grew, nothing got stuck, every text is that of a solo run")
        return
    messages.print("nothing leaked, nothing got stuck, every text is that of a solo run")
    longest = max((one.seconds for one in report.memory), default=0.0)
    messages.print(f"whether memory grows: {TOO_SHORT}; it was seen for {longest:.0f} s (raise --seconds)")
