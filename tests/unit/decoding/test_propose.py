import math
import struct

import pytest
import torch

from outrider.core.proposal import SparseLaw
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.decoding.keys import Purpose, derive_key
from outrider.decoding.laws import LawBlock, target_law
from outrider.decoding.noise import gumbel
from outrider.decoding.propose import ProposeRow, propose
from outrider.decoding.verify import VerifyRow, verify

VOCAB = 50
LOGITS = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
COUPLED, REJECTION = VerificationRule.COUPLED, VerificationRule.REJECTION


def row(
    sampling: SamplingParams, rule: VerificationRule, *, key: int = 3, num_ranked: int = 0, q_top_k: int = 8
) -> ProposeRow:
    return ProposeRow(
        sampling=sampling, prefix=[1, 2, 3, 4], prompt_len=2, noise_key=key, rule=rule, q_top_k=q_top_k,
        num_ranked=num_ranked,
    )  # fmt: skip


SHARED = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.2, top_p=0.9, frequency_penalty=1.0),
]


@pytest.mark.parametrize("sampling", SHARED)
def test_a_draft_with_the_targets_logits_is_always_accepted(sampling: SamplingParams) -> None:
    text, drafted = [1, 2, 3, 4], list[int]()
    for j in range(7):
        step = ProposeRow(
            sampling=sampling, prefix=[*text, *drafted], prompt_len=2, noise_key=3, rule=COUPLED, q_top_k=1
        )
        (token,) = propose(LOGITS[j : j + 1], [step])
        assert token.law is None
        drafted.append(token.token_id)
    judged = VerifyRow(
        sampling=sampling, prefix=text, prompt_len=2, noise_key=3, draft_token_ids=tuple(drafted), rule=COUPLED
    )
    assert verify(LOGITS, [judged])[0].num_accepted == 7


@pytest.mark.parametrize("sampling", SHARED)
def test_margin_and_ranks_are_those_of_the_perturbed_law(sampling: SamplingParams) -> None:
    law = target_law(LOGITS[:1], [LawBlock(sampling=sampling, prefix=[1, 2, 3, 4], prompt_len=2)])[0]
    scores = law if sampling.greedy else law + gumbel(3, 4, Purpose.TARGET, VOCAB)
    values, ids = scores.topk(4)
    (token,) = propose(LOGITS[:1], [row(sampling, COUPLED, num_ranked=4)])
    assert token.token_id == ids[0]
    assert token.margin == pytest.approx((values[0] - values[1]).item(), abs=1e-6)
    assert token.ranked_token_ids == tuple(ids.tolist())


def test_a_token_without_rival_has_an_infinite_margin_and_no_runner_up() -> None:
    (token,) = propose(LOGITS[:1], [row(SamplingParams(top_k=1), COUPLED, num_ranked=3)])
    assert token.margin == math.inf
    assert token.ranked_token_ids == (token.token_id,)
    (token,) = propose(LOGITS[:1], [row(SamplingParams(top_k=1), REJECTION, num_ranked=3)])
    assert token.margin == math.inf
    assert token.law == SparseLaw(token_ids=(token.token_id,), probs=(1.0,))


def test_greedy_tie_goes_to_the_lowest_id_with_margin_zero() -> None:
    (token,) = propose(torch.zeros(1, VOCAB), [row(SamplingParams(temperature=0), COUPLED, num_ranked=2)])
    assert (token.token_id, token.margin) == (0, 0.0)
    assert token.ranked_token_ids[0] == 0


def test_transmitted_law_is_the_renormalised_top_of_the_draft_law_in_float32() -> None:
    sampling = SamplingParams(temperature=0.9, top_k=20)
    p = target_law(LOGITS[:1], [LawBlock(sampling=sampling, prefix=[1, 2, 3, 4], prompt_len=2)])[0].softmax(0)
    for q_top_k in (1, 8, 30):
        (token,) = propose(LOGITS[:1], [row(sampling, REJECTION, q_top_k=q_top_k, num_ranked=3)])
        assert token.law is not None
        size = min(q_top_k, 20)
        values, ids = p.topk(size)
        assert token.law.token_ids == tuple(ids.tolist())
        assert token.law.probs == pytest.approx((values / values.sum()).tolist(), rel=1e-5)
        assert sum(token.law.probs) == pytest.approx(1.0, abs=1e-6)
        assert all(struct.unpack("f", struct.pack("f", prob))[0] == prob for prob in token.law.probs)
        assert token.token_id in token.law.token_ids
        assert token.ranked_token_ids == token.law.token_ids[: min(3, size)]


def test_the_drawn_token_follows_the_transmitted_law() -> None:
    count = 6000
    rows = [row(SamplingParams(), REJECTION, key=derive_key(2, i), q_top_k=4) for i in range(count)]
    tokens = propose(LOGITS[:1].expand(count, -1), rows)
    q = tokens[0].law
    assert q is not None
    assert {token.law for token in tokens} == {q}
    drawn = [token.token_id for token in tokens]
    chi = sum((drawn.count(i) - count * p) ** 2 / (count * p) for i, p in zip(q.token_ids, q.probs, strict=True))
    assert chi < 16.3  # 3 degrees of freedom, p = 0.001


def test_draft_noise_is_not_the_targets() -> None:
    """Under the rejection rule equal laws agree by chance only; shared noise would agree always."""
    count = 2000
    logits = torch.zeros(count, 4)
    keys = [derive_key(3, i) for i in range(count)]
    tokens = propose(logits, [row(SamplingParams(), REJECTION, key=key) for key in keys])
    plain = verify(
        logits,
        [
            VerifyRow(sampling=SamplingParams(), prefix=[1, 2, 3, 4], prompt_len=2, noise_key=key, rule=REJECTION)
            for key in keys
        ],
    )
    agreeing = sum(token.token_id == verdict.next_token_id for token, verdict in zip(tokens, plain, strict=True))
    assert agreeing / count == pytest.approx(0.25, abs=0.04)


def test_rows_of_both_rules_mix_in_one_batch() -> None:
    rows = [
        row(SamplingParams(), REJECTION, num_ranked=2),
        row(SamplingParams(temperature=0), REJECTION),
        row(SamplingParams(top_p=0.5), COUPLED, num_ranked=4),
        row(SamplingParams(), REJECTION, q_top_k=3),
        row(SamplingParams(temperature=0), COUPLED),
    ]
    together = propose(LOGITS[:5], rows)
    assert together == [propose(LOGITS[i : i + 1], [one])[0] for i, one in enumerate(rows)]
    assert together[1].law == SparseLaw(token_ids=(together[1].token_id,), probs=(1.0,))
    assert together[3].law is not None
    assert len(together[3].law.token_ids) == 3


def test_what_cannot_work_is_refused() -> None:
    assert propose(LOGITS[:0], []) == []
    with pytest.raises(ValueError, match="rows of logits"):
        propose(LOGITS[:2], [row(SamplingParams(), COUPLED)])
    with pytest.raises(ValueError, match="q_top_k"):
        row(SamplingParams(), REJECTION, q_top_k=0)
    with pytest.raises(ValueError, match="prompt_len"):
        ProposeRow(sampling=SamplingParams(), prefix=[], prompt_len=1, noise_key=0, rule=COUPLED, q_top_k=1)
