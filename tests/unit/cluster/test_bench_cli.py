"""`outrider bench` and `outrider soak`: options, exit codes, and the table."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.local.bench_runs import cell, run, stats
from typer.testing import CliRunner

from outrider.core.errors import ConfigError
from outrider.core.speculation import SpeculationMode
from outrider.local.bench.off_cost import OffCost
from outrider.local.bench.plan import Mode
from outrider.local.bench.result import BenchResult
from outrider.local.bench.widths import WidthShares
from outrider_cluster.cli import app
from outrider_cluster.cli.bench_options import LoadOptions, PairOptions
from outrider_cluster.cli.bench_table import show_bench

LOAD = {
    "prompt_sets": "code,chat",
    "prompt_file": None,
    "concurrency": "1,16",
    "request_rate": None,
    "num_prompts": 4,
    "max_tokens": 8,
    "repeats": 1,
}


def modes(draft: str, peer: str | None, *, wanted: str | None = None, remote: bool = False) -> tuple[Mode, ...]:
    return LoadOptions(**LOAD).plan(wanted, draft=draft, peer=peer, remote=remote).modes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("draft", "peer", "expected"),
    [
        ("none", None, "plain"),
        ("self", None, "plain speculative"),
        ("self", "hf", "plain speculative hf_plain"),  # transformers has no four-bit copy
        ("ngram", "hf", "plain speculative hf_plain hf_assisted"),
        ("small", "hf", "plain speculative hf_plain hf_assisted"),
        ("none", "hf", "plain hf_plain"),
    ],
)
def test_all_modes_that_apply_are_measured(draft: str, peer: str | None, expected: str) -> None:
    assert " ".join(mode.value for mode in modes(draft, peer)) == expected


def test_modes_can_be_chosen_and_must_be_possible() -> None:
    assert modes("ngram", "hf", wanted="hf_plain, plain") == (Mode.HF_PLAIN, Mode.PLAIN)
    assert modes("none", None, remote=True) == (Mode.PLAIN, Mode.SPECULATIVE)  # the deployment may have a draft
    with pytest.raises(ConfigError, match="hf_plain cannot run with --draft self and --peer not given"):
        modes("self", None, wanted="hf_plain")
    with pytest.raises(ConfigError, match="--modes: 'fast' is not a valid Mode"):
        modes("self", None, wanted="fast")
    with pytest.raises(ConfigError, match="--peer: runs beside a local engine"):
        modes("self", "hf", remote=True)


def test_a_stack_is_sized_for_its_load(tmp_path: Path) -> None:
    plan = LoadOptions(**LOAD).plan(None, draft="ngram", peer=None, remote=False)  # type: ignore[arg-type]
    pair = PairOptions(model="m", draft="ngram", dtype="bf16", threads=2, draft_threads=None)
    settings = pair.sized(plan, max_model_len=300, k=6, mode="cached")
    assert settings.draft is None
    assert (settings.loop.max_num_seqs, settings.loop.prompt_lookup_max) == (16, 4)
    assert not settings.loop.enable_prefix_cache  # every mode runs the same prompts
    assert (settings.gate.mode, settings.gate.max_num_draft_tokens) == (SpeculationMode.CACHED, 6)
    assert (settings.target.dtype, settings.target.threads) == ("bfloat16", 2)
    itself = PairOptions(model="m", draft="self", dtype="fp32", threads=2, draft_threads=1)
    draft = itself.sized(plan, max_model_len=300, k=6, mode="auto").draft
    assert draft is not None
    assert (draft.model, draft.quantization, draft.threads) == ("m", "int4", 1)
    with pytest.raises(ConfigError, match="--k: 17"):
        itself.settings(plan, k=17, mode="auto", progress=lambda text: None)


def test_the_scripted_engine_writes_a_report(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    outcome = CliRunner().invoke(
        app, ["bench", "--engine", "scripted", "--off-runs", "0", "--max-tokens", "4", "--json", str(file)]
    )
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(file.read_text())
    assert (report["dtype"], report["threads"], report["rows"], report["ratios"]) == ("float64", 1, [], {})
    assert list(report["step_ms"]) == ["plan", "wait", "forward", "verify", "commit", "emit"]
    assert [one["num_seqs"] for one in report["details"]["accounting_cpu_ms"]] == [1] * 4 + [64] * 4
    assert "together" in outcome.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["bench", "--prompt-sets", "poems"], "no set 'poems'"),
        (["bench", "--json", "/nowhere/x.json"], "the folder does not exist"),
        (["bench", "--concurrency", "one"], "--concurrency: "),
        (["bench", "--concurrency", "25"], "25 different ones are needed"),
        (["bench", "--k", "0"], "--k: 0 is outside"),
        (["soak", "--seconds", "0"], "--seconds: 0"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_1(arguments: list[str], problem: str) -> None:
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 1
    assert problem in outcome.output.replace("\n", " ")


def test_a_short_scripted_soak_passes() -> None:
    outcome = CliRunner().invoke(app, ["soak", "--engine", "scripted", "--seconds", "0.2", "--streams", "8"])
    assert outcome.exit_code == 0, outcome.output
    assert "every text is that of a solo run" in outcome.output


def test_the_table_shows_everything_that_was_measured() -> None:
    speculative = run(20, stats([4, 4], [3, 1]), steps=2)
    result = BenchResult(
        dtype="bfloat16",
        threads=2,
        draft="self",
        num_draft_tokens=2,
        cells=(
            cell({Mode.PLAIN: [run(10)], Mode.SPECULATIVE: [speculative], Mode.HF_ASSISTED: [run(5)]}),
            cell({Mode.PLAIN: [run(10)]}, concurrency=None, request_rate=2.5),
        ),
        widths=WidthShares(read_s=0.01, step_s={1: 0.02, 6: 0.04}),
        off_cost=OffCost(off_ms=(1.0,), unconfigured_ms=(1.0,), draft_messages=0, extra_rows=0),
        versions={"torch": "2"},
    )
    console = Console(file=io.StringIO(), width=200)
    show_bench(result, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in (
        "bfloat16, 2 threads, draft self, K = 2",
        "2.00x (2.00–2.00)",
        "2.5/s",
        "acceptance by position (code, 1): 0.75 0.25",
        "speculative over hf_assisted (code): 4.00x",
        "weights read once in 10.0 ms",
        "0 draft messages, 0 extra rows",
        "width6_share_of_bound 0.25",
        "versions: torch 2",
        "Enable speculation",
    ):
        assert part in text
