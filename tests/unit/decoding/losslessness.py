"""The statistical test of losslessness: the joint law of two tokens, speculative against exact."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from tests.unit.decoding.reference import BigramModel, reference_law

from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.decoding.keys import derive_key
from outrider.decoding.propose import ProposeRow, propose
from outrider.decoding.verify import VerifyRow, verify

VOCAB = 6
TARGET = BigramModel(vocab=VOCAB, seed=0, scale=1.3)
DRAFT = BigramModel(vocab=VOCAB, seed=2, scale=1.3)
PROMPT = [1, 4, 4]

LAWS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.7),
    "top-k": SamplingParams(top_k=3),
    "top-p": SamplingParams(temperature=0.8, top_p=0.8),
    "min-p": SamplingParams(min_p=0.2),
    "penalties": SamplingParams(frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.2),
    "all": SamplingParams(temperature=1.3, top_k=5, top_p=0.95, min_p=0.02, logit_bias=((0, 1.0), (2, -100.0))),
}


def sample_pairs(
    sampling: SamplingParams, rule: VerificationRule, *, count: int, k: int = 2, use_draft: bool = True
) -> tuple[NDArray[np.int64], float]:
    """Counts [vocab, vocab] of the first two output tokens over `count` sequences, and acceptance.

    Each sequence drafts k tokens with the draft model (or always the same ones, as an n-gram lookup
    would, without it), verifies them, and draws plainly if only one token was committed.
    """
    rows = [
        VerifyRow(sampling=sampling, prefix=PROMPT, prompt_len=2, noise_key=derive_key(5, i), rule=rule)
        for i in range(count)
    ]
    drafted = _draft(rows, k) if use_draft else [replace(r, draft_token_ids=(3, 3)) for r in rows]
    texts = [[*PROMPT, *r.draft_token_ids[:j]] for r in drafted for j in range(r.num_rows)]
    verdicts = verify(TARGET.batch_logits(texts), drafted)
    texts = [list(verdict.token_ids[:2]) for verdict in verdicts]
    short = [i for i, text in enumerate(texts) if len(text) == 1]
    plain = [replace(rows[i], prefix=[*PROMPT, *texts[i]]) for i in short]
    more = verify(TARGET.batch_logits([r.prefix for r in plain]), plain) if plain else []
    for i, verdict in zip(short, more, strict=True):
        texts[i].append(verdict.next_token_id)
    counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    for first, second in texts:
        counts[first, second] += 1
    return counts, sum(verdict.num_accepted > 0 for verdict in verdicts) / count


def _draft(rows: Sequence[VerifyRow], k: int) -> list[VerifyRow]:
    """The rows with k tokens each from the draft model; q is transmitted for 4 of the 6 tokens."""
    drafted = list(rows)
    for j in range(k):
        steps = [
            ProposeRow(
                sampling=r.sampling, prefix=[*r.prefix, *r.draft_token_ids], prompt_len=r.prompt_len,
                noise_key=r.noise_key, rule=r.rule, q_top_k=4,
            )
            for r in drafted
        ]  # fmt: skip
        proposed = propose(DRAFT.batch_logits([step.prefix for step in steps]), steps)
        drafted = [
            replace(
                r,
                draft_token_ids=(*r.draft_token_ids, token.token_id),
                draft_laws=(*r.draft_laws, token.law) if token.law else (),
            )
            for r, token in zip(drafted, proposed, strict=True)
        ]
        assert {len(r.draft_token_ids) for r in drafted} == {j + 1}
    return drafted


def joint_law(sampling: SamplingParams) -> NDArray[np.float64]:
    """p(first) p(second | first), exactly: [vocab, vocab]."""
    first = reference_law(TARGET.logits(PROMPT).tolist(), sampling, PROMPT, 2)
    rows = []
    for token_id, p in enumerate(first):
        text = [*PROMPT, token_id]
        rows.append([p * q for q in reference_law(TARGET.logits(text).tolist(), sampling, text, 2)])
    return np.array(rows)


def p_value(counts: NDArray[np.int64], law: NDArray[np.float64]) -> float:
    """Chi-square of counts against a law; cells expected fewer than five times are merged.

    0 if something impossible happened.
    """
    expected = law * counts.sum()
    if counts[law == 0].any():
        return 0.0
    rare = (expected < 5) & (law > 0)
    common = expected >= 5
    observed_cells = np.append(counts[common], counts[rare].sum())
    expected_cells = np.append(expected[common], expected[rare].sum())
    filled = expected_cells > 0
    return float(stats.chisquare(observed_cells[filled], expected_cells[filled]).pvalue)
