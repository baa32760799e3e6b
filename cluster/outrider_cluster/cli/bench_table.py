"""A benchmark at the terminal: one table, the ratios, the steps, the advice."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from outrider.local.bench.advice import advise
from outrider.local.bench.paired import CellRuns
from outrider.local.bench.plan import Mode
from outrider.local.bench.records import summarised
from outrider.local.bench.report import PAIRS
from outrider.local.bench.result import BenchResult

__all__ = ["show_bench"]


def show_bench(result: BenchResult, console: Console) -> None:
    """Print everything that was measured."""
    if result.cells:
        console.print(_rows(result))
    if result.accounting:
        console.print(_accounting(result))
    for line in _lines(result):
        console.print(line, soft_wrap=True)


def _rows(result: BenchResult) -> Table:
    table = Table(title=_title(result), title_justify="left")
    for name in ("prompts", "load", "mode"):
        table.add_column(name)
    for name in ("tok/s (low–high)", "TTFT ms", "TPOT ms", "ITL p50/p99 ms", "accept", "length", "speed-up (low–high)"):
        table.add_column(name, justify="right")
    for one in result.cells:
        for mode in one.runs:
            table.add_row(*_cells(one, mode))
        table.add_section()
    return table


def _title(result: BenchResult) -> str:
    draft = "no draft" if result.draft is None else f"draft {result.draft}, K = {result.num_draft_tokens}"
    threads = f", {result.threads} threads" if result.threads else ""
    return f"{result.dtype or 'a deployment'}{threads}, {draft}"


def _cells(one: CellRuns, mode: Mode) -> list[str]:
    numbers = summarised(one.runs[mode])
    load = str(one.cell.concurrency) if one.cell.concurrency else f"{one.cell.request_rate:g}/s"
    base = Mode.HF_PLAIN if mode.is_peer else Mode.PLAIN
    speedup = one.speedup(base, mode) if mode is not base else None
    shown = ""
    if speedup is not None:
        ordered = sorted(speedup)
        shown = f"{ordered[len(ordered) // 2]:.2f}x ({ordered[0]:.2f}–{ordered[-1]:.2f})"
    return [
        one.cell.prompt_set,
        load,
        mode.value,
        f"{numbers.tok_s:.1f} ({numbers.tok_s_low:.1f}–{numbers.tok_s_high:.1f})",
        _ms(numbers.ttft_p50_s),
        _ms(numbers.tpot_p50_s),
        f"{_ms(numbers.itl_p50_s)} / {_ms(numbers.itl_p99_s)}",
        "" if numbers.acceptance_rate is None else f"{numbers.acceptance_rate:.2f}",
        "" if numbers.mean_acceptance_length is None else f"{numbers.mean_acceptance_length:.2f}",
        shown,
    ]


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f}"


def _accounting(result: BenchResult) -> Table:
    table = Table(title="CPU time of a step on the scripted engine, ms", title_justify="left")
    for name in ("sequences", "mode", "temperature", "steps", "plan", "verify", "commit", "emit", "together"):
        table.add_column(name, justify="right")
    for one in result.accounting:
        phases = [f"{one.phase_ms.get(phase, 0.0):.3f}" for phase in ("plan", "verify", "commit", "emit")]
        mode = "speculative" if one.speculates else "plain"
        table.add_row(
            str(one.num_seqs), mode, f"{one.temperature:g}", str(one.steps), *phases, f"{one.overhead_ms:.3f}"
        )
    return table


def _lines(result: BenchResult) -> Iterator[str]:
    for one in result.cells:
        for mode in (Mode.SPECULATIVE,):
            if mode in one.runs and (shares := summarised(one.runs[mode]).acceptance_per_position):
                name = f"{one.cell.prompt_set}, {one.cell.concurrency or one.cell.request_rate}"
                yield f"acceptance by position ({name}): " + " ".join(f"{share:.2f}" for share in shares)
        for over, of in PAIRS[2:]:
            if (ratios := one.speedup(over, of)) is not None:
                yield f"{of.value} over {over.value} ({one.cell.prompt_set}): " + " ".join(f"{r:.2f}x" for r in ratios)
    if result.step_ms and not result.accounting:
        yield "a step, ms: " + ", ".join(f"{phase} {ms:.2f}" for phase, ms in result.step_ms.items())
    if result.widths is not None:
        widths = ", ".join(f"{rows} row(s) {1e3 * seconds:.1f} ms" for rows, seconds in result.widths.step_s.items())
        yield f"weights read once in {1e3 * result.widths.read_s:.1f} ms; a forward of {widths}"
    if result.off_cost is not None:
        cost = result.off_cost
        yield (
            f"speculation gated off: {cost.draft_messages} draft messages, {cost.extra_rows} extra rows, "
            f"CPU time of a step {cost.ratio:.3f} of not configured"
        )
    if result.ratios:
        yield "ratios: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in result.ratios.items())
    yield from (f"note: {note}" for note in result.notes)
    yield "versions: " + ", ".join(f"{name} {version}" for name, version in result.versions.items())
    if (advice := advise(result)) is not None:
        yield str(advice)
