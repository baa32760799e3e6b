"""Gate and autoscaler under one burst, in virtual time."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.autoscaling_policy import _apply_delay_logic

from outrider.core.errors import ConfigError
from outrider.core.load import LoadTargets
from outrider.core.policy import GateSettings
from outrider.core.speculation import SpeculationMode
from outrider.emulation.autoscaler import Autoscaler, ScalingSettings
from outrider.emulation.burst import BurstMoment, BurstResult, BurstSettings, Phase, run_burst
from outrider.emulation.burst_chart import burst_chart

# Every sequence that has a draft speculates unless the load forbids it: what is left out is the gate's work.
GATE = GateSettings(
    mode=SpeculationMode.SEQUENTIAL, max_num_draft_tokens=4, batch_size_threshold=4, min_acceptance_rate=0.0
)
SETTINGS = BurstSettings(
    phases=(Phase(seconds=60, streams=2), Phase(seconds=240, streams=12), Phase(seconds=240, streams=2)),
    scaling=ScalingSettings(targets=LoadTargets(sequences=3.0, queue_s=60.0), measure_interval_s=4.0, look_back_s=8.0),
    gate=GATE,
    max_num_seqs=8,
    slowdown=30.0,
)


@pytest.fixture(scope="module")
def result() -> BurstResult:
    return run_burst(SETTINGS)


def of(moments: tuple[BurstMoment, ...], start: float, end: float) -> Iterator[BurstMoment]:
    return (one for one in moments if start <= one.seconds < end)


def shares(result: BurstResult, start: float, end: float) -> list[float]:
    return [one.speculative_share for one in of(result.moments, start, end) if one.speculative_share is not None]


def test_no_request_fails_and_every_text_is_right(result: BurstResult) -> None:
    assert result.requests > 100
    assert (result.failed, result.wrong) == (0, 0)


def test_the_gate_closes_in_the_step_that_crosses_the_threshold(result: BurstResult) -> None:
    assert result.late_gate_steps == 0
    assert min(shares(result, 20, 60)) > 0.7
    assert shares(result, 72, 100) == [0.0] * len(shares(result, 72, 100)), "off while one engine has it all"


def test_engines_come_one_delay_and_one_start_later_and_speculation_with_them(result: BurstResult) -> None:
    assert all(one.ready == 1 for one in of(result.moments, 0, 60 + 10 + 40))
    assert all(one.ready == 4 for one in of(result.moments, 130, 300))
    assert min(shares(result, 180, 290)) > 0.3, "twelve streams on four engines are three each"


def test_all_goes_back_and_what_leaves_finishes_first(result: BurstResult) -> None:
    assert result.moments[-1].ready == 1
    assert [one.drafts for one in (result.moments[0], *of(result.moments, 200, 204), result.moments[-1])] == [1, 2, 1]
    assert min(shares(result, 440, 500)) > 0.7


def test_it_never_flaps(result: BurstResult) -> None:
    wanted = [one.wanted for one in result.moments]
    assert sum(before != after for before, after in itertools.pairwise(wanted)) == 2


def test_dozens_of_engines_share_a_burst() -> None:
    big = BurstSettings(
        phases=(Phase(seconds=40, streams=30), Phase(seconds=160, streams=120)),
        scaling=ScalingSettings(
            targets=LoadTargets(sequences=3.0), min_replicas=10, max_replicas=60, measure_interval_s=4.0, start_s=20.0
        ),
        gate=GATE,
        max_num_seqs=8,
        slowdown=100.0,
    )
    result = run_burst(big)
    assert max(one.ready for one in result.moments) >= 40
    assert (result.failed, result.wrong, result.late_gate_steps) == (0, 0, 0)


def test_the_chart_is_one_document_with_a_line_for_every_series(result: BurstResult) -> None:
    chart = ElementTree.fromstring(burst_chart(result.moments, SETTINGS, "a < b"))
    assert len(chart.findall(".//{http://www.w3.org/2000/svg}polyline")) == 6


@given(st.lists(st.tuples(st.floats(0.1, 30), st.integers(1, 8)), max_size=40))
def test_delays_are_those_of_serve(wishes: list[tuple[float, int]]) -> None:
    scaling = ScalingSettings(max_replicas=8, upscale_delay_s=10.0, downscale_delay_s=60.0)
    ours = Autoscaler(scaling)
    config = SimpleNamespace(upscale_delay_s=10.0, downscale_delay_s=60.0, downscale_to_zero_delay_s=None)
    theirs, state, now = 1, {}, 0.0  # type: ignore[var-annotated]
    for pause, desired in wishes:
        now += pause
        theirs, state = _apply_delay_logic(desired, theirs, config, state, _now=now)  # type: ignore[arg-type]
        assert ours.decide(now, desired) == theirs


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_replicas": 0}, "max_replicas"),
        ({"look_back_s": 0.0}, "look_back_s"),
        ({"start_s": -1.0}, "start_s"),
        ({"targets_per_draft": 0}, "targets_per_draft"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(wrong: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ScalingSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [(), (0.0,), (float("nan"),), (float("inf"),)])
def test_a_burst_needs_time_that_ends(seconds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="phases"):
        BurstSettings(phases=tuple(Phase(seconds=one, streams=1) for one in seconds))
