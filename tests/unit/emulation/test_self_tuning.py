"""The gate that tunes itself, on emulated devices in virtual time: near the best, off when hopeless, and back."""

from dataclasses import replace

import pytest

from outrider.core.policy import GateSettings
from outrider.core.speculation import SpeculationPreference
from outrider.emulation.harness import EmulationMode, EmulationRun, run_emulation
from outrider.emulation.pair import Load, PairProfile, PairSettings
from outrider.emulation.sample import Sample
from outrider.emulation.virtual_run import run_virtual
from outrider.engine.emulated.text import TextSettings

AUTO = GateSettings(mode=None, max_num_draft_tokens=7, batch_size_threshold=None)


@pytest.mark.parametrize(("batch", "steps"), [(1, 300), (16, 60), (64, 40)])
@pytest.mark.parametrize("acceptance", [0.4, 0.85])
def test_auto_is_near_the_best_mode(batch: int, steps: int, acceptance: float) -> None:
    run = EmulationRun(mode=EmulationMode.AUTO, batch=batch, acceptance=acceptance, steps=steps)
    auto = run_emulation(run)
    others = [
        run_emulation(replace(run, mode=mode))
        for mode in (EmulationMode.PLAIN, EmulationMode.SEQUENTIAL, EmulationMode.CACHED)
    ]
    assert auto.tok_s_total >= 0.97 * max(one.tok_s_total for one in others)


def test_its_own_choice_of_k_beats_a_given_one() -> None:
    """Nine draft steps fit into a verify step of this pair."""
    run = EmulationRun(mode=EmulationMode.AUTO, steps=400)
    auto, seven = run_emulation(run), run_emulation(replace(run, mode=EmulationMode.CACHED, k=7))
    assert auto.tok_s_stream > 1.04 * seven.tok_s_stream
    assert auto.k_mean > seven.k_mean + 0.8


def test_a_block_that_is_wanted_too_long_comes_as_long_as_there_is_time_for() -> None:
    run = EmulationRun(mode=EmulationMode.CACHED, k=9, steps=400)
    fits, too_long = run_emulation(run), run_emulation(replace(run, k=14))
    assert too_long.k_mean > fits.k_mean - 0.5
    assert too_long.tok_s_stream > 0.95 * fits.tok_s_stream


@pytest.mark.parametrize("batch", [1, 32])
def test_hopeless_acceptance_settles_on_plain(batch: int) -> None:
    run = EmulationRun(mode=EmulationMode.AUTO, batch=batch, acceptance=0.05, warmup_steps=150, steps=150)
    auto = run_emulation(run)
    plain = run_emulation(replace(run, mode=EmulationMode.PLAIN))
    assert auto.k_mean < 0.15, "only probes speculate"
    assert auto.tok_s_total >= 0.98 * plain.tok_s_total


def test_it_comes_back_within_a_second_of_device_time_when_acceptance_rises() -> None:
    changes_at = 400
    settings = PairSettings(
        profile=PairProfile(),
        text=TextSettings(acceptance=0.05, acceptance_changes=((changes_at, 0.85),)),
        batch=1,
        prompt_len=64,
        max_tokens=4000,
    )
    samples: list[Sample] = []
    run_virtual(settings, AUTO, Load(warmup_steps=50, steps=600), drafts=True, observe=samples.append)
    rose = next(one for one in samples if one.committed >= changes_at - 64)
    later = [one for one in samples if one.seconds >= rose.seconds + 1.0]
    after = later[40].since(later[0])
    assert after.verified > 4 * after.rounds, "a second later most rounds verify a long block"


def test_the_explicit_threshold_overrides() -> None:
    closed = replace(AUTO, batch_size_threshold=4)
    run = EmulationRun(mode=EmulationMode.AUTO, batch=8, acceptance=0.85, steps=40, gate=closed)
    assert run_emulation(run).k_mean == 0.0
    forced = replace(run, gate=replace(closed, preference=SpeculationPreference.ON))
    assert run_emulation(forced).k_mean > 3.0
