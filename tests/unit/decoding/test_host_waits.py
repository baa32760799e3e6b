"""Sampling makes the host wait for the device once, for its result: counted by what has to ask the device.

On the CPU such questions cost nothing, so they slip in unseen; on a GPU each waits for the forward.
"""

from typing import Any

import pytest
import torch
from tests.support.host_waits import questions

from outrider.core.proposal import SparseLaw
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.decoding.propose import ProposeRow, propose
from outrider.decoding.verify import VerifyRow, verify

VOCAB = 300


def logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))


def row(rule: VerificationRule, *, drafted: tuple[int, ...] = (), **sampling: Any) -> VerifyRow:
    law = SparseLaw(token_ids=(3, 4), probs=(0.5, 0.5))
    ratio = rule is VerificationRule.REJECTION and sampling.get("temperature", 1.0) > 0
    return VerifyRow(
        sampling=SamplingParams(**sampling),
        prefix=[1, 2, 3, 4, 5],
        prompt_len=2,
        noise_key=9,
        draft_token_ids=drafted,
        draft_laws=(law,) * len(drafted) if ratio else (),
        rule=rule,
    )


@pytest.mark.parametrize("rule", list(VerificationRule))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_verify_asks_nothing_on_the_way(rule: VerificationRule, temperature: float) -> None:
    rows = [row(rule, drafted=(3, 4), temperature=temperature), row(rule, temperature=temperature)]
    assert questions(lambda: verify(logits(4), rows)) == []


def test_verify_of_a_mixed_batch_asks_nothing_on_the_way() -> None:
    rows = [
        row(VerificationRule.COUPLED, drafted=(3,), temperature=0.0),
        row(VerificationRule.COUPLED, temperature=1.0, logit_bias=((3, -100.0), (7, 2.0))),
        row(VerificationRule.REJECTION, drafted=(3, 4), temperature=1.0),
    ]
    assert questions(lambda: verify(logits(6), rows)) == []


@pytest.mark.parametrize("rule", list(VerificationRule))
def test_propose_asks_nothing_on_the_way(rule: VerificationRule) -> None:
    one = ProposeRow(
        sampling=SamplingParams(temperature=0.8),
        prefix=[1, 2, 3],
        prompt_len=1,
        noise_key=4,
        rule=rule,
        q_top_k=8,
        num_ranked=3,
    )
    assert questions(lambda: propose(logits(2), [one, one])) == []


def test_the_count_sees_a_question() -> None:
    assert questions(lambda: float(logits(1).sum())) == ["_local_scalar_dense"]
