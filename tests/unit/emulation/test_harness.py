"""Emulated runs: against their bounds, against each other, and against themselves."""

from dataclasses import replace
from functools import partial

import pytest

from outrider.emulation.bound import BoundModel, expected_tokens, outcome_hit_rate
from outrider.emulation.harness import EmulationMode, EmulationRun, gate_for, run_emulation
from outrider.emulation.pair import (
    EmulatedDraft,
    EmulatedTarget,
    Load,
    PairProfile,
    PairSettings,
    emulated_request,
    greeting,
)
from outrider.emulation.virtual_link import VirtualDraft
from outrider.emulation.virtual_run import VirtualResult, run_virtual
from outrider.emulation.virtual_time import VirtualTime
from outrider.engine.emulated.device import h100_llama_1b, h100_tp4_llama_70b
from outrider.engine.emulated.text import COUPLED_RANK_SHARES, TextSettings

PLAIN, SEQUENTIAL = EmulationMode.PLAIN, EmulationMode.SEQUENTIAL


def reference(acceptance: float = 0.85) -> BoundModel:
    return BoundModel(
        target=h100_tp4_llama_70b(),
        draft=h100_llama_1b(),
        hop_s=0.25e-3,
        acceptance=acceptance,
        rank_shares=COUPLED_RANK_SHARES,
    )


def test_the_bounds_are_those_of_the_design() -> None:
    model = reference()
    assert outcome_hit_rate(0.85, 7, 24, COUPLED_RANK_SHARES) == pytest.approx(0.80, abs=0.02)
    assert model.sequential(1, 7) == pytest.approx(216, abs=2)
    assert model.cached(1, 7, 24) == pytest.approx(318, abs=6)
    assert model.cached(1, 10, 24) == pytest.approx(342, abs=8)


def test_expected_tokens_are_the_geometric_sum() -> None:
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(0.78, 5) == pytest.approx((1 - 0.78**6) / (1 - 0.78))


def test_every_outcome_is_hit_when_all_have_branches_and_ranks_are_complete() -> None:
    assert outcome_hit_rate(0.7, 3, 100, (0.6, 0.4)) == pytest.approx(1.0)
    # One branch: the block is accepted whole and its first guess follows, or nothing beats that.
    assert outcome_hit_rate(0.9, 1, 1, (0.6, 0.4)) == pytest.approx(0.81)


@pytest.mark.parametrize("batch", [1, 8])
def test_plain_decoding_runs_at_its_bound(batch: int) -> None:
    row = run_emulation(EmulationRun(mode=PLAIN, batch=batch, steps=50))
    assert row.bound_ratio == pytest.approx(1.0, abs=0.005)
    assert (row.k_mean, row.draft_utilisation, row.hit_rate) == (0.0, 0.0, None)


@pytest.mark.parametrize(("batch", "steps"), [(1, 800), (16, 60)])
@pytest.mark.parametrize("acceptance", [0.4, 0.85])
def test_sequential_speculation_runs_near_its_bound(batch: int, steps: int, acceptance: float) -> None:
    row = run_emulation(EmulationRun(mode=SEQUENTIAL, batch=batch, acceptance=acceptance, steps=steps))
    # Acceptance is drawn: the mean length of 800 rounds has a standard deviation of 2 % of itself.
    expected = expected_tokens(acceptance, 7)
    assert row.mean_acceptance_length == pytest.approx(expected, rel=0.07)
    assert row.k_mean == 7.0
    # What is left of the difference is the schedule's own.
    assert row.bound_ratio * expected / row.mean_acceptance_length == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("batch", [1, 8])
def test_cached_speculation_runs_near_its_bound_and_asks_nobody(batch: int) -> None:
    run = EmulationRun(mode=EmulationMode.CACHED, batch=batch, steps=400 // batch)
    row, sequential = run_emulation(run), run_emulation(replace(run, mode=SEQUENTIAL))
    assert row.bound_ratio > 0.9
    assert row.tok_s_stream > 1.3 * sequential.tok_s_stream
    assert row.hit_rate is not None
    assert row.hit_rate > outcome_hit_rate(0.85, 7, 24, COUPLED_RANK_SHARES) - 0.05
    assert row.zero_round_trip_hits > 0.7 * 400


def test_the_draft_is_busy_as_long_as_its_steps_take() -> None:
    row = run_emulation(EmulationRun(mode=SEQUENTIAL, steps=100))
    assert row.draft_utilisation == pytest.approx(8.4 / 22.4, abs=0.01)


def test_two_runs_are_equal() -> None:
    run = EmulationRun(mode=SEQUENTIAL, batch=4, steps=40)
    assert run_emulation(run) == run_emulation(run)
    assert run_emulation(run) != run_emulation(replace(run, first_seed=100))


def test_a_longer_hop_costs_two_hops_a_round() -> None:
    slow = EmulationRun(mode=SEQUENTIAL, steps=100, profile=PairProfile(hop_s=2.25e-3))
    fast, slowed = run_emulation(EmulationRun(mode=SEQUENTIAL, steps=100)), run_emulation(slow)
    rounds_s = [one.mean_acceptance_length / one.tok_s_stream for one in (fast, slowed)]
    assert rounds_s[1] - rounds_s[0] == pytest.approx(4e-3, rel=0.02)


def virtual(mode: EmulationMode, *, batch: int, k: int, steps: int) -> VirtualResult:
    settings = PairSettings(text=TextSettings(acceptance=0.7), batch=batch, max_tokens=1000)
    drafts = mode is not PLAIN
    return run_virtual(settings, gate_for(mode, k), Load(warmup_steps=1, steps=steps), drafts=drafts)


@pytest.mark.parametrize("k", [1, 4, 8])
def test_every_mode_gives_the_same_text(k: int) -> None:
    plain = virtual(PLAIN, batch=3, k=k, steps=120)
    for mode in (SEQUENTIAL, EmulationMode.CACHED, EmulationMode.AUTO):
        other = virtual(mode, batch=3, k=k, steps=40)
        assert len(other.texts) == 3
        for text, expected in zip(other.texts, plain.texts, strict=True):
            length = min(len(text), len(expected))
            assert length > 40
            assert text[:length] == expected[:length]


def fleet(num_engines: int) -> tuple[dict[int, list[int]], float, float]:
    """Engines that share one draft, one stream each: their texts, the draft's busy share, tokens per second."""
    settings = PairSettings(text=TextSettings(acceptance=0.7), batch=num_engines, max_tokens=1000)
    time, gate = VirtualTime(), gate_for(SEQUENTIAL, 4)
    draft = EmulatedDraft(settings, time)
    replica = VirtualDraft(draft.drafter, draft.config, time, hop_s=0.25e-3)
    texts: dict[int, list[int]] = {}

    def live(index: int, target: EmulatedTarget) -> None:
        time.run(0.01 + 0.001 * index)  # the draft warms up first; engines are out of step
        target.submit(index, emulated_request(settings, 1 + index))
        for _ in range(60):
            target.loop.step()
        texts.update(target.texts)

    time.add("draft", replica.live, background=True)
    for index in range(num_engines):
        link = replica.link(greeting(settings, f"engine {index}"))
        time.add(f"engine {index}", partial(live, index, EmulatedTarget(settings, gate, link, time)))
    time.simulate()
    return texts, draft.engine.busy_s / time.now(), sum(map(len, texts.values())) / time.now()


def test_engines_share_a_draft_and_its_device() -> None:
    alone, busy_alone, rate_alone = fleet(1)
    texts, busy, rate = fleet(5)
    assert texts[0][:100] == alone[0][:100]
    assert busy > 1.5 * busy_alone
    assert rate > 3.5 * rate_alone
    plain = virtual(PLAIN, batch=5, k=1, steps=60)
    for index, expected in enumerate(plain.texts):
        assert texts[index][: len(expected)] == list(expected)[: len(texts[index])]


def test_counters_can_be_watched() -> None:
    seen: list[int] = []
    settings = PairSettings(max_tokens=100)
    load = Load(warmup_steps=3, steps=5)
    run_virtual(settings, gate_for(PLAIN, 1), load, drafts=False, observe=lambda sample: seen.append(sample.committed))
    assert seen == [4, 5, 6, 7, 8]
