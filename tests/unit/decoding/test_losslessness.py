"""Speculative output follows p: chi-square per law and rule, with a draft whose law differs from p."""

import pytest
import torch
from tests.unit.decoding.losslessness import LAWS, VOCAB, joint_law, p_value, sample_pairs

from outrider.core.proposal import SparseLaw
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.decoding.keys import derive_key
from outrider.decoding.verify import VerifyRow, verify

COUNT = 3000


@pytest.mark.parametrize("rule", list(VerificationRule))
@pytest.mark.parametrize("name", LAWS)
def test_two_tokens_follow_the_joint_law(name: str, rule: VerificationRule) -> None:
    counts, acceptance = sample_pairs(LAWS[name], rule, count=COUNT)
    assert p_value(counts, joint_law(LAWS[name])) > 1e-3
    assert 0.15 < acceptance < 0.95  # both branches were exercised


@pytest.mark.parametrize("name", ["plain", "top-p", "all"])
def test_proposals_without_a_law_are_point_masses(name: str) -> None:
    """An n-gram proposal under the rejection rule: accepted with probability p, else p without it."""
    counts, acceptance = sample_pairs(LAWS[name], VerificationRule.REJECTION, count=COUNT, use_draft=False)
    law = joint_law(LAWS[name])
    assert p_value(counts, law) > 1e-3
    assert acceptance == pytest.approx(law.sum(1)[3], abs=0.035)


def test_the_test_can_fail() -> None:
    """Counts of one temperature do not pass for another's law, nor impossible tokens for possible."""
    counts, _ = sample_pairs(LAWS["plain"], VerificationRule.REJECTION, count=COUNT)
    assert p_value(counts, joint_law(SamplingParams(temperature=1.25))) < 1e-6
    assert p_value(counts, joint_law(LAWS["top-k"])) == 0.0


def test_a_wrong_q_would_be_noticed() -> None:
    """The token is always 3, but q claims a half: a ratio test against that q is biased, so q matters."""
    rows = [
        VerifyRow(
            sampling=SamplingParams(), prefix=[0], prompt_len=1, noise_key=derive_key(1, i), draft_token_ids=(3,),
            draft_laws=(SparseLaw(token_ids=(3, 4), probs=(0.5, 0.5)),), rule=VerificationRule.REJECTION,
        )
        for i in range(COUNT)
    ]  # fmt: skip
    verdicts = verify(torch.zeros(2 * COUNT, VOCAB), rows)
    share = sum(verdict.token_ids[0] == 3 for verdict in verdicts) / COUNT
    assert share == pytest.approx(1 / 3, abs=0.03)  # 1/6 is right
