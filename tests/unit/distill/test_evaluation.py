"""Rounds walked by hand, and a draft that is its target."""

import pytest
from tests.unit.distill.requests import greedy_text

from outrider.core.sampling import SamplingParams
from outrider.distill.evaluation import acceptance_of, agreement, round_acceptance
from outrider.distill.sampling import SampledText, Sampler, SampleRequest
from outrider.engine.scripted import ScriptedConfig, ScriptedEngine


def test_rounds_are_walked_as_a_target_would() -> None:
    # yes yes no | yes (end): two rounds, of three tokens and of one
    shares, mean = round_acceptance([[True, True, False, True]], k=3)
    assert shares == (1.0, 1.0, 0.0)
    assert mean == 2.0


def test_a_full_round_brings_one_token_more() -> None:
    shares, mean = round_acceptance([[True] * 6], k=2)
    assert (shares, mean) == ((1.0, 1.0), 3.0)


def test_a_position_counts_only_when_it_is_reached() -> None:
    shares, mean = round_acceptance([[False, False], [False, True]], k=2)
    # rounds: no | no | no | yes
    assert (shares, mean) == ((0.25,), 1.0)  # no block got to its second token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_agrees_with_itself(temperature: float) -> None:
    engine = ScriptedEngine(ScriptedConfig())
    sampler = Sampler(engine, num_slots=4, max_len=40, end_ids=frozenset())
    requests = [
        SampleRequest(
            prompt_ids=(1, 2, number), max_new_tokens=12, sampling=SamplingParams(temperature=temperature), noise_key=9
        )
        for number in range(3)
    ]
    (result,) = acceptance_of(
        engine, engine, sampler, {"own": requests}, k=3, num_valid_ids=64, tell=lambda share: None
    )
    assert (result.name, result.temperature, result.positions) == ("own", temperature, 36)
    assert (result.first, result.per_position, result.mean_length) == (1.0, (1.0, 1.0, 1.0), 4.0)
    assert result.rejection is None if temperature == 0 else result.rejection == pytest.approx(1.0)


def test_a_worse_draft_agrees_less_at_every_temperature() -> None:
    target = ScriptedEngine(ScriptedConfig())
    draft = ScriptedEngine(ScriptedConfig(agreement=0.5))
    for temperature in (0.0, 1.0):
        text = greedy_text(target, temperature=temperature, length=100)
        matches, overlap = agreement(target, draft, text, num_valid_ids=64)
        assert 0 < sum(matches) < len(matches)
        assert len(overlap) == (0 if temperature == 0 else 100)
        assert all(0.0 <= value <= 1.0 + 1e-9 for value in overlap.tolist())
    assert isinstance(text, SampledText)


def test_prompts_that_are_all_too_long_leave_nothing_to_measure() -> None:
    engine = ScriptedEngine(ScriptedConfig())
    sampler = Sampler(engine, num_slots=1, max_len=4, end_ids=frozenset())
    long = SampleRequest(
        prompt_ids=(1, 2, 3, 4), max_new_tokens=1, sampling=SamplingParams(temperature=1.0), noise_key=1
    )
    (result,) = acceptance_of(engine, engine, sampler, {"own": [long]}, k=1, num_valid_ids=64, tell=lambda share: None)
    assert (result.positions, result.rejection) == (0, None)
