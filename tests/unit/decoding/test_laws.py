import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.decoding.reference import reference_law

from outrider.core.sampling import SamplingParams
from outrider.decoding.laws import LawBlock, target_law

VOCAB = 9
TEXT = (1, 4, 4, 2, 7, 7, 7, 0)

sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 20]),
    top_p=st.sampled_from([1.0, 1.0, 0.313, 0.77, 0.959]),
    min_p=st.sampled_from([0.0, 0.0, 0.0713, 0.313]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 2.0, -0.7]),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.9]),
    logit_bias=st.sampled_from([(), ((3, -100.0),), ((2, 1.5), (5, -3.0)), ((6, 100.0),), ((1, 100.0), (8, 100.0))]),
    min_tokens=st.sampled_from([0, 4, 6]),
    suppressed_token_ids=st.sampled_from([(), (0,), (1, 7)]),
)


def block(sampling: SamplingParams, draft: tuple[int, ...] = (), *, prompt_len: int = 3) -> LawBlock:
    return LawBlock(sampling=sampling, prefix=list(TEXT), prompt_len=prompt_len, draft_token_ids=draft)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.lists(st.tuples(sampling_params, st.lists(st.integers(0, VOCAB - 1), max_size=4)), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
def test_every_row_has_the_law_of_the_book(cases: list[tuple[SamplingParams, list[int]]], seed: int) -> None:
    """Batches of mixed parameters and block lengths; counts include the earlier tokens of the block."""
    blocks = [block(sampling, tuple(draft)) for sampling, draft in cases]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(b.num_rows for b in blocks), VOCAB, generator=generator, dtype=torch.float64) * 2
    untouched = logits.clone()
    law = target_law(logits, blocks)
    assert torch.equal(logits, untouched)
    row = 0
    for one in blocks:
        for j in range(one.num_rows):
            text = [*TEXT, *one.draft_token_ids[:j]]
            expected = reference_law(logits[row].tolist(), one.sampling, text, one.prompt_len)
            if one.sampling.greedy:
                assert law[row].argmax().item() == expected.index(1.0)
            else:
                assert law[row].softmax(0).tolist() == pytest.approx(expected, abs=1e-9)
            row += 1


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.95),
        SamplingParams(temperature=1.4, top_p=0.99, min_p=0.001),
        SamplingParams(top_k=40, frequency_penalty=1.0, repetition_penalty=1.2),
    ],
)
def test_a_law_is_bitwise_the_same_in_any_block_and_batch(sampling: SamplingParams) -> None:
    draft = (5, 9, 5, 11, 300)
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(3)) * 2
    others = [block(SamplingParams(temperature=0.3, top_k=7)), block(SamplingParams(temperature=0))]
    whole = target_law(torch.cat([logits, logits[:2]]), [block(sampling, draft), *others])
    for j in range(6):
        prefix = [*TEXT, *draft[:j]]
        plain = target_law(logits[j : j + 1], [LawBlock(sampling=sampling, prefix=prefix, prompt_len=3)])
        assert torch.equal(plain[0], whole[j])


def test_penalties_count_the_earlier_tokens_of_the_same_block() -> None:
    """Token 5 stands nowhere in the text: row 0 is free of it, row 1 has it once, row 3 twice."""
    sampling = SamplingParams(frequency_penalty=2.0, presence_penalty=0.5)
    law = target_law(torch.zeros(4, VOCAB), [block(sampling, (5, 6, 5))])
    against = (law[:, 5] - law[:, 3]).tolist()  # token 3 never occurs
    assert against == pytest.approx([0.0, -2.5, -2.5, -4.5])
    assert (law[:, 7] - law[:, 3]).tolist() == pytest.approx([-6.5] * 4)  # three times in the output


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    logits = torch.full((1, VOCAB), 2.0)
    repeated = target_law(logits, [block(SamplingParams(repetition_penalty=2.0))])[0]
    assert repeated.tolist() == pytest.approx([-1 if i in TEXT else 0 for i in range(VOCAB)])
    counted = target_law(logits, [block(SamplingParams(presence_penalty=1.0))])[0]
    assert counted.tolist() == pytest.approx([-1 if i in TEXT[3:] else 0 for i in range(VOCAB)])
    resumed = target_law(logits, [block(SamplingParams(presence_penalty=1.0), prompt_len=1)])[0]
    assert resumed.tolist() == pytest.approx([-1 if i in TEXT[1:] else 0 for i in range(VOCAB)])


def test_min_tokens_suppresses_exactly_the_rows_below_it() -> None:
    sampling = SamplingParams(min_tokens=7, suppressed_token_ids=(0, 4))  # five output tokens so far
    law = target_law(torch.zeros(4, VOCAB), [block(sampling, (1, 1, 1))])
    assert (law[:, [0, 4]] == -torch.inf).all(1).tolist() == [True, True, False, False]
    assert law[:, 1].isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 100.0])
def test_bias_of_100_forces_and_forbids_at_any_temperature(temperature: float) -> None:
    logits = torch.tensor([[30.0, 0.0, -30.0, 5.0]])
    forbid = SamplingParams(temperature=temperature, logit_bias=((0, -100.0),))
    force = SamplingParams(temperature=temperature, logit_bias=((2, 100.0),))
    free = LawBlock(sampling=forbid, prefix=[], prompt_len=0)
    assert target_law(logits, [free])[0, 0] == -torch.inf
    forced = target_law(logits, [LawBlock(sampling=force, prefix=[], prompt_len=0)])
    assert (forced[0] > -torch.inf).tolist() == [False, False, True, False]


def test_a_forced_token_that_must_wait_for_min_tokens_does_not_empty_the_law() -> None:
    sampling = SamplingParams(logit_bias=((0, 100.0),), min_tokens=6, suppressed_token_ids=(0,))
    law = target_law(torch.zeros(2, VOCAB), [block(sampling, (1,))])
    assert (law[0] > -torch.inf).tolist() == [False] + [True] * (VOCAB - 1)
    assert (law[1] > -torch.inf).tolist() == [True] + [False] * (VOCAB - 1)


def test_padding_columns_and_ids_outside_the_vocabulary_do_not_count() -> None:
    logits = torch.zeros(1, 12)
    logits[:, VOCAB:] = 50.0
    sampling = SamplingParams(
        logit_bias=((11, 100.0),), frequency_penalty=1.0, min_tokens=99, suppressed_token_ids=(10,)
    )
    law = target_law(logits, [LawBlock(sampling=sampling, prefix=[10, 1], prompt_len=0)], VOCAB)
    assert law.shape == (1, VOCAB)
    assert law[0].tolist() == pytest.approx([-1 if i == 1 else 0 for i in range(VOCAB)])


def test_tiny_temperature_is_greedy_in_the_limit() -> None:
    law = target_law(torch.tensor([[1.0, 1.5, -2.0]]), [block(SamplingParams(temperature=1e-300))])
    assert law.softmax(1).tolist() == [[0.0, 1.0, 0.0]]


def test_half_precision_logits_become_float32() -> None:
    logits = torch.randn(1, VOCAB).bfloat16()
    assert target_law(logits, [block(SamplingParams())]).dtype is torch.float32


def test_mismatched_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of logits"):
        target_law(torch.zeros(2, VOCAB), [block(SamplingParams())])
    with pytest.raises(ValueError, match="num_valid_ids 10"):
        target_law(torch.zeros(1, VOCAB), [block(SamplingParams())], 10)
    with pytest.raises(ValueError, match="rows, vocab"):
        target_law(torch.zeros(VOCAB), [block(SamplingParams())])
