"""What a sweep says of itself: JSON, chart and command."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from outrider.core.errors import ConfigError
from outrider.emulation.chart import speedup_chart
from outrider.emulation.harness import EmulationMode, Row
from outrider.emulation.report import report_as_json, speedups
from outrider.emulation.sweep import Sweep
from outrider_cluster.cli import app

KEYS = {
    "batch",
    "alpha",
    "mode",
    "tok_s_stream",
    "tok_s_total",
    "bound_tok_s_stream",
    "hit_rate",
    "zero_round_trip_hits",
    "k_mean",
    "draft_utilisation",
}


def row(batch: int, alpha: float, mode: str, tok_s_stream: float) -> Row:
    return Row(
        batch=batch,
        alpha=alpha,
        mode=mode,
        tok_s_stream=tok_s_stream,
        tok_s_total=tok_s_stream * batch,
        bound_tok_s_stream=2 * tok_s_stream,
        bound_ratio=0.5,
        mean_acceptance_length=1.0,
        hit_rate=None,
        zero_round_trip_hits=0,
        k_mean=0.0,
        draft_utilisation=0.0,
    )


ROWS = [row(1, 0.8, "plain", 50.0), row(1, 0.8, "cached", 200.0), row(4, 0.8, "plain", 40.0), row(4, 0.8, "auto", 60.0)]


def test_a_sweep_runs_every_combination_long_enough() -> None:
    sweep = Sweep(batches=(1, 128), acceptances=(0.4, 0.8), modes=(EmulationMode.PLAIN, EmulationMode.AUTO))
    runs = list(sweep.runs())
    assert len(runs) == len(sweep) == 8
    assert {(run.batch, run.acceptance, run.mode.value) for run in runs} == {
        (batch, alpha, mode) for batch in (1, 128) for alpha in (0.4, 0.8) for mode in ("plain", "auto")
    }
    assert all(run.batch * run.steps >= 512 for run in runs)
    assert {run.steps for run in Sweep(steps=9).runs()} == {9}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"batches": ()}, "batches"),
        ({"batches": (0,)}, "batches: 0"),
        ({"batches": (2, 2)}, "batches"),
        ({"acceptances": (1.5,)}, "acceptances"),
        ({"k": 17}, "k: 17"),
        ({"steps": 0}, "steps: 0"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Sweep(**changes)


def test_speedups_are_over_plain_decoding_at_the_same_point() -> None:
    assert speedups(ROWS) == {
        (0.8, 1, "plain"): 1.0,
        (0.8, 1, "cached"): 4.0,
        (0.8, 4, "plain"): 1.0,
        (0.8, 4, "auto"): 1.5,
    }
    assert speedups(ROWS[1:2]) == {}


def test_json_says_that_it_is_emulated_and_on_what() -> None:
    report = report_as_json(Sweep(), ROWS, clock="virtual")
    assert report["emulated"] is True
    assert report["profile"]["verify_ms"] == pytest.approx(13.5, abs=0.01)
    assert report["profile"]["draft_step_ms"] == pytest.approx(1.2, abs=0.01)
    assert report["profile"]["clock"] == "virtual"
    assert all(set(one) >= KEYS for one in report["rows"])
    json.dumps(report, allow_nan=False)


def test_the_chart_is_one_svg_with_a_line_for_each_mode() -> None:
    root = ElementTree.fromstring(speedup_chart(ROWS, "Emulated: a & b"))
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "Emulated: a & b" in texts
    assert "acceptance 0.8" in texts
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 3


def test_the_command_writes_json_and_a_chart(tmp_path: Path) -> None:
    out, plot = tmp_path / "rows.json", tmp_path / "chart.svg"
    options = ["--batches", "1,2", "--alphas", "0.85", "--modes", "plain,sequential", "--k", "3", "--steps", "20"]
    result = CliRunner().invoke(app, ["emulate", "--json", str(out), "--plot", str(plot), *options])
    assert result.exit_code == 0, result.output
    assert "Emulated" in result.output
    report = json.loads(out.read_text())
    assert [(one["batch"], one["mode"]) for one in report["rows"]] == [
        (1, "plain"),
        (1, "sequential"),
        (2, "plain"),
        (2, "sequential"),
    ]
    assert report["profile"]["k"] == 3
    assert "Emulated" in plot.read_text()


@pytest.mark.parametrize(
    "options", [["--modes", "fast"], ["--batches", "x"], ["--alphas", "2"], ["--json", "/nowhere/rows.json"]]
)
def test_bad_options_end_with_an_error_before_anything_runs(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["emulate", *options])
    assert result.exit_code == 1
    assert "error: " in result.stderr
