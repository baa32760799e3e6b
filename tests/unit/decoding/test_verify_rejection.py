"""The rejection rule, case by case. Its law is tested in test_losslessness."""

import pytest
import torch

from outrider.core.proposal import SparseLaw
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.decoding import rejection
from outrider.decoding.keys import Purpose, derive_key, uniform
from outrider.decoding.noise import gumbel
from outrider.decoding.verify import VerifyRow, verify

VOCAB = 8
PREFIX = [1, 2, 3, 4]


def law(*pairs: tuple[int, float]) -> SparseLaw:
    return SparseLaw(token_ids=tuple(i for i, _ in pairs), probs=tuple(p for _, p in pairs))


def row(
    draft: tuple[int, ...] = (),
    laws: tuple[SparseLaw, ...] = (),
    *,
    key: int = 1,
    sampling: SamplingParams | None = None,
    rule: VerificationRule = VerificationRule.REJECTION,
) -> VerifyRow:
    return VerifyRow(
        sampling=sampling or SamplingParams(),
        prefix=PREFIX,
        prompt_len=2,
        noise_key=key,
        draft_token_ids=draft,
        draft_laws=laws,
        rule=rule,
    )


def probabilities(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def test_each_step_can_be_recomputed_by_hand() -> None:
    """p = (.5 .3 .2) on tokens 0..2, q = (.1 .6 .3): accept 1 iff u < 1/2, else draw from (.4 0 0)."""
    p = [0.5, 0.3, 0.2, 0, 0, 0, 0, 0]
    q = law((1, 0.6), (2, 0.3), (0, 0.1))
    seen = set()
    for key in range(30):
        (verdict,) = verify(probabilities(p, p), [row((1,), (q,), key=key)])
        if uniform(key, 4, Purpose.ACCEPT) < 0.5:
            bonus = probabilities(p)[0] + gumbel(key, 5, Purpose.TARGET, VOCAB)
            assert verdict.token_ids == (1, bonus.argmax().item())
        else:
            assert verdict.token_ids == (0,)
        seen.add(verdict.num_accepted)
    assert seen == {0, 1}


def test_recovered_token_uses_noise_of_its_own() -> None:
    p, q = [0.25, 0.25, 0.5, 0, 0, 0, 0, 0], law((3, 1.0))
    for key in range(30):
        (verdict,) = verify(probabilities(p, p), [row((3,), (q,), key=key)])
        residual = probabilities(p)[0] + gumbel(key, 4, Purpose.RESIDUAL, VOCAB)
        assert verdict.token_ids == (residual.argmax().item(),)


def test_equal_laws_accept_everything() -> None:
    p = [0.125] * VOCAB
    q = law(*enumerate(p))
    draft = (0, 5, 7, 3, 3)
    for key in range(50):
        (verdict,) = verify(probabilities(*[p] * 6), [row(draft, (q,) * 5, key=key)])
        assert verdict.token_ids[:5] == draft
        assert verdict.num_accepted == 5


def test_a_residual_that_rounds_to_nothing_falls_back_to_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """q exceeds p by less than a float32 shows, and u falls into that gap: what is left is p itself."""
    monkeypatch.setattr(rejection, "uniform", lambda *_: 1 - 2.0**-52)
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, :2] = 0.0
    q = law((0, 0.5 + 2.0**-26), (1, 0.5 - 2.0**-26))
    seen = set()
    for key in range(20):
        (verdict,) = verify(logits, [row((0,), (q,), key=key)])
        assert verdict.num_accepted == 0
        seen.add(verdict.next_token_id)
    assert seen == {0, 1}


def test_plain_rows_draw_the_same_under_both_rules() -> None:
    logits = torch.randn(1, VOCAB)
    for key in range(20):
        one, other = (verify(logits, [row(key=key, rule=rule)]) for rule in VerificationRule)
        assert one == other


def test_rejection_at_temperature_0_is_greedy() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 5], logits[1, 2] = 1.0, 1.0
    q = law((5, 0.01), (6, 0.99))
    sampling = SamplingParams(temperature=0)
    for laws in ((), (q, law((2, 1.0)))):
        (verdict,) = verify(logits, [row((5, 2), laws, sampling=sampling)])
        assert verdict.token_ids == (5, 2, 0)


def test_the_same_seed_gives_the_same_verdict_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(80, 3, VOCAB, generator=generator) / 3
    q = law((0, 0.25), (3, 0.5), (6, 0.25))
    rows = [row((3, 6), (q, q), key=derive_key(1, i)) for i in range(80)]
    together = verify(logits.flatten(0, 1), rows)
    assert together == [verify(one, [r])[0] for one, r in zip(logits, rows, strict=True)]
    assert {verdict.num_accepted for verdict in together} == {0, 1, 2}


def test_rules_and_lengths_mix_in_one_batch() -> None:
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(1))
    q = law((1, 0.5), (2, 0.5))
    rows = [
        row((1, 2), (q, q)),
        row((4,), rule=VerificationRule.COUPLED),
        row(),
        row((6, 1), sampling=SamplingParams(temperature=0)),
    ]
    alone, start = [], 0
    for one in rows:
        alone += verify(logits[start : start + one.num_rows], [one])
        start += one.num_rows
    assert start == 9
    assert verify(logits, rows) == alone


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (law((2, 1.0)), "no probability under its own law"),
        (law((1, 0.0), (2, 1.0)), "no probability under its own law"),
        (law((1, 0.5), (1, 0.5)), "distinct"),
        (law((1, 0.5), (VOCAB, 0.5)), "outside"),
        (law((1, 0.5), (-1, 0.5)), "outside"),
        (law((1, 1.5), (2, -0.5)), "negative"),
        (law((1, float("nan"))), "not finite"),
        (law((1, 0.5), (2, 0.4)), "sums to"),
        (SparseLaw(token_ids=(1, 2), probs=(1.0,)), "pair"),
    ],
)
def test_a_law_that_cannot_be_true_is_refused(bad: SparseLaw, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        verify(torch.zeros(2, VOCAB), [row((1,), (bad,))])


def test_as_many_laws_as_tokens() -> None:
    with pytest.raises(ValueError, match="1 draft laws for 2 draft tokens"):
        row((1, 2), (law((1, 1.0)),))
