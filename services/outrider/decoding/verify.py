"""Verification of a whole step: logits of all rows in, one verdict per sequence out.

The committed text follows the target's law whatever was proposed. Under the coupled rule it is even
the same text for a seed: row j's token is the target's own draw, and a draft token only decides
whether the draw of the next row may be used (Daliri et al. 2024, arXiv 2408.07978).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.proposal import SparseLaw
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.core.verdict import TokenLogprobs, Verdict
from outrider.decoding.draw import first_argmax, with_noise
from outrider.decoding.keys import Purpose
from outrider.decoding.laws import LawBlock, takes_maximum, target_law, valid_logits
from outrider.decoding.logprobs import LogprobRequest, raw_logprobs
from outrider.decoding.noise import seed_runs
from outrider.decoding.rejection import RejectionBlock, judge_by_rejection, point_mass
from outrider.decoding.transfer import device_index, to_device

__all__ = ["VerifyRow", "verify"]

_LAW_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRow:
    """One sequence in a verify step: 1 + k rows of logits. Plain decoding is k = 0."""

    sampling: SamplingParams
    prefix: Sequence[int]
    """All committed token ids, prompt included. Read during `verify`, never kept."""
    prompt_len: int
    noise_key: int
    draft_token_ids: tuple[int, ...] = ()
    draft_laws: tuple[SparseLaw, ...] = ()
    """Rejection rule: q of each draft token. Empty for a deterministic proposer (n-gram), whose q is
    a point mass, and under the coupled rule, which has no ratio."""
    rule: VerificationRule
    num_top_logprobs: int | None = None
    """None: no log-probabilities; 0: of the committed tokens alone."""

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_len <= len(self.prefix):
            raise ValueError(f"prompt_len {self.prompt_len} of {len(self.prefix)} committed tokens")
        if self.draft_laws and self.rule is VerificationRule.COUPLED:
            raise ValueError("draft laws with the coupled rule: shared noise never goes with a ratio test")
        if self.draft_laws and len(self.draft_laws) != len(self.draft_token_ids):
            raise ValueError(f"{len(self.draft_laws)} draft laws for {len(self.draft_token_ids)} draft tokens")

    @property
    def num_rows(self) -> int:
        """Rows of logits: 1 + k."""
        return 1 + len(self.draft_token_ids)

    @property
    def uses_ratio(self) -> bool:
        """True when tokens are judged by the ratio p/q; a greedy law is judged by equality."""
        return self.rule is VerificationRule.REJECTION and not self.sampling.greedy

    @property
    def law_block(self) -> LawBlock:
        """What shapes the laws of this row's logits."""
        return LawBlock(
            sampling=self.sampling,
            prefix=self.prefix,
            prompt_len=self.prompt_len,
            draft_token_ids=self.draft_token_ids,
        )


@torch.no_grad()
def verify(logits: Tensor, rows: Sequence[VerifyRow], num_valid_ids: int | None = None) -> list[Verdict]:
    """Judge every sequence of a step: one verdict per entry of `rows`, in order.

    `logits` [sum of 1 + k_i, vocab] are left as they are; columns from `num_valid_ids` on can never
    be drawn. Row j of a sequence decides the token at position len(prefix) + j. Raises ValueError
    when logits and rows do not match, or a draft token or law is out of range.
    """
    if not rows:
        return []
    raw = valid_logits(logits, num_valid_ids)
    for row in rows:
        _check(row, raw.shape[1])
    if all(takes_maximum(row.sampling) for row in rows):
        tokens = _judge_maxima(raw, rows)
    else:
        tokens = _judge(target_law(logits, [row.law_block for row in rows], num_valid_ids), rows)
    logprobs = _logprobs(raw, rows, tokens)
    return [
        Verdict(num_draft_tokens=len(row.draft_token_ids), token_ids=token_ids, logprobs=entries)
        for row, token_ids, entries in zip(rows, tokens, logprobs, strict=True)
    ]


def _judge(law: Tensor, rows: Sequence[VerifyRow]) -> list[tuple[int, ...]]:
    """The tokens that each sequence commits, accepted ones first. One copy to the host."""
    starts = _starts(rows)
    coupled = [i for i, row in enumerate(rows) if not row.uses_ratio]
    by_ratio = [i for i, row in enumerate(rows) if row.uses_ratio]
    results = []
    if coupled:
        results.append(_coupled_draws(law, rows, coupled, starts))
    if by_ratio:
        blocks = [_rejection_block(rows[i], starts[i]) for i in by_ratio]
        results.extend(judge_by_rejection(law, blocks))
    values = iter(torch.cat(results).tolist())
    tokens: dict[int, tuple[int, ...]] = {}
    for i in coupled:
        tokens[i] = _matching(rows[i].draft_token_ids, [next(values) for _ in range(rows[i].num_rows)])
    accepted = [next(values) for _ in by_ratio]
    for i, length in zip(by_ratio, accepted, strict=True):
        tokens[i] = (*rows[i].draft_token_ids[:length], next(values))
    return [tokens[i] for i in range(len(rows))]


def _judge_maxima(raw: Tensor, rows: Sequence[VerifyRow]) -> list[tuple[int, ...]]:
    """`_judge` where every draw is the first maximum of its logits. Raises ValueError as `target_law` does."""
    if sum(row.num_rows for row in rows) != raw.shape[0]:
        raise ValueError(f"{raw.shape[0]} rows of logits for {[row.num_rows for row in rows]} rows of sequences")
    draws = first_argmax(raw).tolist()
    starts = _starts(rows)
    return [
        _matching(row.draft_token_ids, draws[start : start + row.num_rows])
        for row, start in zip(rows, starts, strict=True)
    ]


def _coupled_draws(law: Tensor, rows: Sequence[VerifyRow], chosen: Sequence[int], starts: Sequence[int]) -> Tensor:
    """The target's own draw at every row of the chosen sequences, one after the other."""
    if len(chosen) < len(rows):
        wanted = [starts[i] + j for i in chosen for j in range(rows[i].num_rows)]
        law = law.index_select(0, device_index(wanted, law.device))
    drawn = [rows[i] for i in chosen]
    sampled = [row for row in drawn if not row.sampling.greedy]
    if not sampled:
        return first_argmax(law)
    seeds = seed_runs(
        [row.noise_key for row in sampled],
        [len(row.prefix) for row in sampled],
        [row.num_rows for row in sampled],
        Purpose.TARGET,
    )
    noisy = [
        start + j
        for row, start in zip(drawn, _starts(drawn), strict=True)
        if not row.sampling.greedy
        for j in range(row.num_rows)
    ]
    truncated = [cuts for row in sampled for cuts in (row.sampling.truncates,) * row.num_rows]
    return first_argmax(with_noise(law, to_device(seeds, law.device), noisy, truncated))


def _matching(draft_token_ids: Sequence[int], draws: Sequence[int]) -> tuple[int, ...]:
    """The target's draws up to and including the first that differs from the draft, or all of them."""
    for j, token_id in enumerate(draft_token_ids):
        if draws[j] != token_id:
            return tuple(draws[: j + 1])
    return tuple(draws)


def _rejection_block(row: VerifyRow, first_row: int) -> RejectionBlock:
    """The row as the rejection rule sees it; without laws every token was certain to be proposed."""
    return RejectionBlock(
        first_row=first_row,
        position=len(row.prefix),
        noise_key=row.noise_key,
        token_ids=row.draft_token_ids,
        laws=row.draft_laws or tuple(point_mass(token_id) for token_id in row.draft_token_ids),
    )


def _logprobs(
    raw: Tensor, rows: Sequence[VerifyRow], tokens: Sequence[tuple[int, ...]]
) -> list[tuple[TokenLogprobs, ...]]:
    """Log-probabilities of the committed tokens of every sequence that asked for them."""
    requests = [
        LogprobRequest(row=start + j, token_id=token_id, num_top=row.num_top_logprobs)
        for row, start, token_ids in zip(rows, _starts(rows), tokens, strict=True)
        if row.num_top_logprobs is not None
        for j, token_id in enumerate(token_ids)
    ]
    entries = iter(raw_logprobs(raw, requests))
    return [
        () if row.num_top_logprobs is None else tuple(next(entries) for _ in token_ids)
        for row, token_ids in zip(rows, tokens, strict=True)
    ]


def _starts(rows: Sequence[VerifyRow]) -> list[int]:
    """Index of each sequence's first row of logits."""
    starts, start = [], 0
    for row in rows:
        starts.append(start)
        start += row.num_rows
    return starts


def _check(row: VerifyRow, vocab: int) -> None:
    """Raise ValueError when something that came from the draft cannot be judged."""
    for token_id in row.draft_token_ids:
        if not 0 <= token_id < vocab:
            raise ValueError(f"draft token id {token_id} is outside 0 … {vocab - 1}")
    for token_id, law in zip(row.draft_token_ids, row.draft_laws, strict=False):
        if len(law.token_ids) != len(law.probs) or len(set(law.token_ids)) != len(law.token_ids):
            raise ValueError("a draft law must pair distinct token ids with probabilities")
        if not all(0 <= i < vocab for i in law.token_ids):
            raise ValueError(f"a draft law has a token id outside 0 … {vocab - 1}")
        if not all(math.isfinite(prob) and prob >= 0 for prob in law.probs):
            raise ValueError("a draft law has a probability that is negative or not finite")
        if abs(sum(law.probs) - 1) > _LAW_SUM_TOLERANCE:
            raise ValueError(f"a draft law sums to {sum(law.probs)}")
        if dict(zip(law.token_ids, law.probs, strict=True)).get(token_id, 0.0) <= 0:
            raise ValueError(f"draft token {token_id} has no probability under its own law")
