"""Greedy and coupled verification: the same text as plain decoding, whatever is proposed."""

import pytest
import torch
from tests.unit.decoding.reference import BigramModel, reference_law

from outrider.core.proposal import SparseLaw
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.decoding.keys import Purpose
from outrider.decoding.noise import gumbel
from outrider.decoding.verify import VerifyRow, verify

VOCAB = 40
MODEL = BigramModel(vocab=VOCAB, seed=1)
PROMPT = [3, 17, 5]
LENGTH = 20

PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "greedy with penalties": SamplingParams(temperature=0, frequency_penalty=1.5, repetition_penalty=1.2),
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=1.8),
    "truncated": SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02),
    "all": SamplingParams(
        temperature=1.2, top_p=0.95, repetition_penalty=1.3, frequency_penalty=0.8, presence_penalty=0.4,
        logit_bias=((4, 3.0), (9, -100.0)), min_tokens=12, suppressed_token_ids=(1, 2),
    ),
}  # fmt: skip


def row(sampling: SamplingParams, prefix: list[int], draft: tuple[int, ...] = (), key: int = 77) -> VerifyRow:
    return VerifyRow(
        sampling=sampling,
        prefix=prefix,
        prompt_len=len(PROMPT),
        noise_key=key,
        draft_token_ids=draft,
        rule=VerificationRule.COUPLED,
    )


def plain_text(sampling: SamplingParams, key: int = 77) -> list[int]:
    """Prompt and output of plain decoding, one token a step."""
    text = list(PROMPT)
    for _ in range(LENGTH):
        (verdict,) = verify(MODEL.block_logits(text, ()), [row(sampling, text, key=key)])
        text.append(verdict.next_token_id)
    return text


@pytest.mark.parametrize("name", PARAMS)
def test_text_equals_plain_decoding_for_every_block_length_and_rejection_position(name: str) -> None:
    sampling = PARAMS[name]
    plain = plain_text(sampling)
    for base in (len(PROMPT), len(PROMPT) + 7):
        blocks, logits, expected = [], [], []
        for k in range(9):
            for wrong in range(k + 1):  # wrong == k: everything is right
                draft = plain[base : base + k]
                if wrong < k:
                    draft[wrong] = (draft[wrong] + 1) % VOCAB
                blocks.append(row(sampling, plain[:base], tuple(draft)))
                logits.append(MODEL.block_logits(plain[:base], draft))
                expected.append(tuple(plain[base : base + wrong + 1]))
        verdicts = verify(torch.cat(logits), blocks)  # all in one batch
        assert [verdict.token_ids for verdict in verdicts] == expected
        assert [verdict.num_draft_tokens for verdict in verdicts] == [k for k in range(9) for _ in range(k + 1)]
        for block, block_logits, tokens in zip(blocks, logits, expected, strict=True):  # and each alone
            assert verify(block_logits, [block])[0].token_ids == tokens


@pytest.mark.parametrize("name", PARAMS)
def test_plain_draw_is_the_argmax_of_the_law_plus_noise(name: str) -> None:
    """By hand: the law of the book, plus the noise of the absolute position."""
    sampling = PARAMS[name]
    text = plain_text(sampling)
    for position in range(len(PROMPT), len(text)):
        law = torch.tensor(
            reference_law(MODEL.logits(text[:position]).tolist(), sampling, text[:position], len(PROMPT)),
            dtype=torch.float64,
        )
        noise = 0 if sampling.greedy else gumbel(77, position, Purpose.TARGET, VOCAB)
        assert text[position] == (law.log() + noise).argmax().item()


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 200)
    logits[0, [190, 70, 71]] = 4.0
    logits[1, [5, 4]] = 4.0
    (verdict,) = verify(logits, [row(PARAMS["greedy"], [1, 2, 3], (70, 4))])
    assert verdict.token_ids == (70, 4, 0)


def test_other_keys_give_other_texts() -> None:
    texts = {tuple(plain_text(PARAMS["plain"], key)) for key in range(10)}
    assert len(texts) == 10


def test_a_draft_token_the_law_forbids_is_rejected() -> None:
    sampling = SamplingParams(logit_bias=((6, -100.0),), top_k=1)
    logits = torch.zeros(2, VOCAB)
    logits[:, 6] = 50.0
    (verdict,) = verify(logits, [row(sampling, [1, 2, 3], (6,))])
    assert verdict.num_accepted == 0
    assert verdict.next_token_id == 0


def test_padding_ids_are_never_drawn() -> None:
    logits = torch.zeros(1, 64)
    logits[:, 50:] = 30.0
    (verdict,) = verify(logits, [row(PARAMS["greedy"], [1, 2, 3])], num_valid_ids=50)
    assert verdict.token_ids == (0,)
    with pytest.raises(ValueError, match="draft token id 50"):
        verify(torch.zeros(2, 64), [row(PARAMS["greedy"], [1, 2, 3], (50,))], num_valid_ids=50)


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(6, VOCAB)
    before = logits.clone()
    verify(logits, [row(PARAMS["all"], [1, 2, 3, 4], (5,)), row(PARAMS["plain"], [1, 2, 3], (4, 4, 4))])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_draft_ids_out_of_range_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="draft token id"):
        verify(torch.zeros(2, VOCAB), [row(PARAMS["plain"], [1, 2, 3], (bad,))])


def test_shared_noise_never_goes_with_a_ratio() -> None:
    law = SparseLaw(token_ids=(1,), probs=(1.0,))
    with pytest.raises(ValueError, match="shared noise"):
        VerifyRow(
            sampling=SamplingParams(), prefix=[1], prompt_len=1, noise_key=0, draft_token_ids=(1,),
            draft_laws=(law,), rule=VerificationRule.COUPLED,
        )  # fmt: skip


def test_nothing_to_verify_is_no_error() -> None:
    assert verify(torch.empty(0, VOCAB), []) == []


def test_rows_must_match_the_logits() -> None:
    with pytest.raises(ValueError, match="rows of logits"):
        verify(torch.zeros(3, VOCAB), [row(PARAMS["plain"], [1, 2, 3], (1,))])
    with pytest.raises(ValueError, match="prompt_len"):
        row(PARAMS["plain"], [1])
