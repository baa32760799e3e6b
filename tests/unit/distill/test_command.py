"""The command around the tool: what a log shows, and how a stop or a wrong word ends it."""

import io
import json
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console
from typer.testing import CliRunner

import outrider.distill.pipeline
from outrider.distill.prompts import user_turn
from outrider.distill.settings import DistillSettings
from outrider_cluster.cli import app
from outrider_cluster.cli.stages import stages_shown
from outrider_cluster.stopping import StopRequested


def invoked(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["distill", *options])
    return result.exit_code, result.output


def test_a_log_gets_a_line_for_every_tenth_of_a_stage() -> None:
    out = io.StringIO()
    with stages_shown(Console(file=out, width=200)) as listen:
        for share in (0.0, 0.01, 0.1, 0.19, 0.55, 1.0, 1.0):
            listen("train", share, "" if share == 0 else f"step {share}")
        listen("evaluate", 0.5, "")
    assert out.getvalue().splitlines() == [
        "train: 0%",
        "train: 10%, step 0.1",
        "train: 55%, step 0.55",
        "train: 100%, step 1.0",
        "evaluate: 50%",
    ]


def test_a_terminal_gets_a_bar_for_every_stage() -> None:
    out = io.StringIO()
    with stages_shown(Console(file=out, width=120, force_terminal=True)) as listen:
        listen("sample", 1.0, "9 tokens")
        listen("train", 0.25, "step 3")
    assert "sample" in out.getvalue()
    assert "25%" in out.getvalue()
    assert "step 3" in out.getvalue()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_stop_says_how_to_go_on_and_is_no_success(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, code: int
) -> None:
    def stopped(*args: object) -> NoReturn:
        raise StopRequested(name)

    monkeypatch.setattr(outrider.distill.pipeline, "distill", stopped)
    got, output = invoked("--output", str(tmp_path / "draft"), "--held-out", "none")
    assert got == code
    assert f"stopped by {name}; the same command goes on from here" in output


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_prompts_of_both_kinds_of_file_reach_the_tool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, suffix: str
) -> None:
    seen: list[DistillSettings] = []

    def noted(settings: DistillSettings, *args: object) -> NoReturn:
        seen.append(settings)
        raise StopRequested("SIGINT")

    monkeypatch.setattr(outrider.distill.pipeline, "distill", noted)
    path = tmp_path / f"prompts.{suffix}"
    turn = {"jsonl": {"prompt": "Why?"}, "json": [{"conversations": [{"from": "human", "value": "Why?"}]}]}
    path.write_text(json.dumps(turn[suffix]))
    invoked("--output", str(tmp_path / "draft"), "--prompts", str(path), "--held-out", "none", "--minutes", "10")
    (settings,) = seen
    assert settings.prompts == (user_turn("Why?"),)
    assert (settings.minutes.sample, settings.minutes.train) == (4.0, 4.5)


def test_lines_that_cannot_be_read_are_counted_aloud_and_end_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def reached(*args: object) -> NoReturn:
        raise StopRequested("SIGINT")

    monkeypatch.setattr(outrider.distill.pipeline, "distill", reached)
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "Why?"}\n{"prompt": \n[]\n')
    code, output = invoked("--output", str(tmp_path / "draft"), "--prompts", str(path), "--held-out", "none")
    assert code == 130
    assert f"prompts: lines left out: 2, the first is {path}:2: neither" in " ".join(output.split())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--minutes", "0"], "--minutes: 0.0 is not above 0"),
        (["--prompts", "nowhere.jsonl"], "prompts: nowhere.jsonl: No such file or directory"),
        (["--held-out", "nothing"], "there is no set 'nothing'; known: chat"),
        (["--target", "nobody"], "'nobody' is no folder"),
        (["--method", "eagle3", "--hidden-size", "64"], "hidden_size: of a draft model"),
        (["--method", "eagle3", "--layers", "4"], "num_layers (--layers): of a draft model"),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path: Path, options: list[str], problem: str) -> None:
    code, output = invoked("--output", str(tmp_path / "draft"), *options)
    assert code == 1
    assert problem in " ".join(output.split())
    assert "Traceback" not in output
