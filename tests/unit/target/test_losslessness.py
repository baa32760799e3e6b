"""Losslessness is a test: with speculation or without, the text of a seed is the same."""

import itertools
import math

import pytest
from tests.support.local_engine import LocalEngine, request

from outrider.core.policy import GateSettings
from outrider.core.request import SequenceRequest
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import SpeculationChoice, SpeculationPreference, VerificationRule
from outrider.engine.scripted import ScriptedConfig, ScriptedEngine
from outrider.target.config import TargetConfig

TARGET = ScriptedConfig(vocab_size=32, slope=0.7)
GREEDY = SamplingParams(temperature=0.0)

SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.2),
    "repetition": SamplingParams(repetition_penalty=1.3),
    "frequency": SamplingParams(frequency_penalty=1.5, presence_penalty=-0.5),
    "bias": SamplingParams(logit_bias=((4, 5.0), (9, -100.0))),
    "min_tokens": SamplingParams(min_tokens=12, suppressed_token_ids=(5, 6, 7)),
    "greedy_penalties": SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.2),
}


def gate(k: int) -> GateSettings:
    return GateSettings(preference=SpeculationPreference.ON, max_num_draft_tokens=k, batch_size_threshold=None)


def batch(size: int, sampling: SamplingParams) -> list[SequenceRequest]:
    return [
        request(range(1, 3 + 5 * index), max_tokens=20 + 3 * index, noise_key=1000 + index, sampling=sampling)
        for index in range(size)
    ]


def texts(engine: LocalEngine, requests: list[SequenceRequest]) -> list[list[int]]:
    return [one.token_ids for one in engine.run(*requests)]


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("k", range(1, 9))
def test_same_text_with_and_without_speculation(name: str, k: int) -> None:
    requests = batch(4, SAMPLINGS[name])
    plain = texts(LocalEngine(target=TARGET), requests)
    draft = ScriptedConfig(vocab_size=32, slope=0.7, agreement=0.7)
    engine = LocalEngine(target=TARGET, draft=draft, gate=gate(k))
    assert texts(engine, requests) == plain
    assert engine.loop.counters.verified > 0
    assert 0 < engine.loop.counters.accepted < engine.loop.counters.verified


@pytest.mark.parametrize("size", range(1, 9))
def test_every_batch_size_gives_the_solo_texts(size: int) -> None:
    requests = batch(size, SamplingParams())
    solo = [texts(LocalEngine(target=TARGET), [one])[0] for one in requests]
    draft = ScriptedConfig(vocab_size=32, slope=0.7, agreement=0.8)
    assert texts(LocalEngine(target=TARGET, draft=draft, gate=gate(5)), requests) == solo


@pytest.mark.parametrize(("k", "rule"), list(itertools.product(range(1, 9), VerificationRule)))
def test_the_oracle_draft_is_accepted_whole(k: int, rule: VerificationRule) -> None:
    """A draft that is the target accepts everything, over long outputs: no hole in its KV."""
    choice = SpeculationChoice(rule=rule)
    sampling = GREEDY if rule is VerificationRule.REJECTION else SamplingParams()
    engine = LocalEngine(target=TARGET, draft=TARGET, gate=gate(k))
    (result,) = engine.run(request(max_tokens=200, sampling=sampling, speculation=choice))
    counters = engine.loop.counters
    assert len(result.token_ids) == 200
    assert counters.accepted == counters.verified > 0
    assert counters.proposers.late == counters.proposers.stale == counters.proposers.invalid == 0


def test_rejection_accepts_the_overlap_of_the_laws() -> None:
    """Expected acceptance is the sum of min(p, q) over the prefixes that were met."""
    draft = ScriptedConfig(vocab_size=32, slope=0.7, agreement=0.5)
    engine = LocalEngine(target=TARGET, draft=draft, gate=gate(1), config=TargetConfig(max_num_seqs=64))
    choice = SpeculationChoice(rule=VerificationRule.REJECTION)
    results = engine.run(*[request(max_tokens=60, noise_key=seed, speculation=choice) for seed in range(64)])
    target_model, draft_model = ScriptedEngine(TARGET), ScriptedEngine(draft)
    texts_so_far = [[1, 2, 3, *one.token_ids[:n]] for one in results for n in range(60)]
    agreed = sum(target_model.favourite(text) == draft_model.favourite(text) for text in texts_so_far)
    share = agreed / len(texts_so_far)
    # Where the draft swaps the two likeliest, the laws overlap by all but (1 - e^-0.7)^2; elsewhere wholly.
    expected = share + (1 - share) * (1 - (1 - math.exp(-0.7)) ** 2)
    counters = engine.loop.counters
    assert counters.accepted / counters.verified == pytest.approx(expected, abs=0.035)


def test_ngram_proposals_change_nothing() -> None:
    prompt = [1, 2, 3, 0] * 6
    requests = [request(prompt, max_tokens=60, noise_key=key, sampling=GREEDY) for key in range(3)]
    plain = texts(LocalEngine(target=ScriptedConfig(vocab_size=4, slope=2.0)), requests)
    engine = LocalEngine(
        target=ScriptedConfig(vocab_size=4, slope=2.0), config=TargetConfig(prompt_lookup_max=3), gate=gate(5)
    )
    assert texts(engine, requests) == plain
    assert engine.loop.counters.accepted > 0


def test_logprobs_equal_those_of_plain_decoding() -> None:
    one = request(max_tokens=30, top_logprobs=3, sampling=SamplingParams(temperature=0.8, top_k=4))
    (plain,) = LocalEngine(target=TARGET).run(one)
    draft = ScriptedConfig(vocab_size=32, slope=0.7, agreement=0.7)
    (fast,) = LocalEngine(target=TARGET, draft=draft, gate=gate(5)).run(one)
    assert fast.token_ids == plain.token_ids
    assert len(fast.logprobs) == len(fast.token_ids)
    for ours, theirs in zip(fast.logprobs, plain.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_resumed_request_continues_with_the_same_text() -> None:
    draft = ScriptedConfig(vocab_size=32, slope=0.7, agreement=0.7)
    (whole,) = LocalEngine(target=TARGET, draft=draft, gate=gate(5)).run(request(max_tokens=40))
    for cut in (1, 7, 39):
        (rest,) = LocalEngine(target=TARGET, draft=draft, gate=gate(3)).run(
            request(max_tokens=40, resume=whole.token_ids[:cut])
        )
        assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids


def test_preemption_changes_no_text() -> None:
    """A pool too small for all: sequences are preempted and recomputed."""
    requests = batch(6, SamplingParams())
    solo = [texts(LocalEngine(target=TARGET), [one])[0] for one in requests]
    small = ScriptedConfig(vocab_size=32, slope=0.7, num_blocks=28)
    draft = ScriptedConfig(vocab_size=32, slope=0.7, agreement=0.8)
    engine = LocalEngine(target=small, draft=draft, gate=gate(4))
    assert texts(engine, requests) == solo
    assert engine.loop.scheduler.num_preemptions > 0
    assert engine.loop.scheduler.kv_usage == 0.0
