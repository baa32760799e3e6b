"""The draft's draw for one step, under the same transforms and noise as the target's.

Coupled rule: the draft takes the argmax of its own law plus the *target's* noise, so that equal
logits give equal tokens. Rejection rule: it samples, with noise of its own, from the truncated law
that it then transmits, so that q is exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.proposal import SparseLaw
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.decoding.draw import DrawRow, first_argmax, perturbed
from outrider.decoding.keys import Counter, Purpose
from outrider.decoding.laws import LawBlock, takes_maximum, target_law, valid_logits
from outrider.decoding.noise import gumbel_at, seed_rows
from outrider.decoding.rejection import point_mass
from outrider.decoding.transfer import device_index

__all__ = ["Draws", "ProposeRow", "ProposedToken", "draw", "propose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeRow:
    """One sequence (or branch) that needs its next draft token. One row serves all steps of a branch."""

    sampling: SamplingParams
    prefix: Sequence[int]
    """Committed text plus the tokens drafted so far; may grow from step to step."""
    prompt_len: int
    noise_key: int
    rule: VerificationRule
    q_top_k: int
    """Rejection rule: how many (token id, probability) pairs of q are transmitted at most."""
    num_ranked: int = 0
    """How many likely tokens of this position to report, for outcome tables."""
    takes_maximum: bool = field(init=False, compare=False, repr=False)
    """True when the draw is the first maximum of the raw logits."""

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_len <= len(self.prefix):
            raise ValueError(f"prompt_len {self.prompt_len} of {len(self.prefix)} tokens")
        if self.rule is VerificationRule.REJECTION and self.q_top_k < 1:
            raise ValueError(f"q_top_k {self.q_top_k} is below 1")
        object.__setattr__(self, "takes_maximum", takes_maximum(self.sampling))

    @property
    def transmits_law(self) -> bool:
        """True when the token is sampled from a law of its own, which the ratio test then needs."""
        return self.rule is VerificationRule.REJECTION and not self.sampling.greedy


class ProposedToken(NamedTuple):
    """A draft token and how sure the draft is of it. A tuple: a tree step makes one for each branch."""

    token_id: int
    law: SparseLaw | None
    """Rejection rule: q, exactly as drawn from; every probability is a float32. Coupled: None."""
    margin: float
    """Perturbed log-weight of the token minus the runner-up's; infinite if it had no rival. Whether a
    token is verified must not depend on it under the rejection rule."""
    ranked_token_ids: tuple[int, ...] = ()
    """The likeliest outcomes of this position, best first: by perturbed weight, the drawn token
    first, under the coupled rule; by q (and no more of them than q has) under the rejection rule,
    whose noise says nothing of the target's draw. At most `num_ranked`."""


class Draws:
    """The draft tokens of one step at once, and what else is known of them when it is asked for.

    The next forward needs the ids alone: margins and ranks can be found out while the device runs it.
    """

    def __init__(self, token_ids: list[int], find_out: Callable[[], list[ProposedToken]] | None = None) -> None:
        self.token_ids = token_ids
        """One for each row."""
        self._find_out = find_out
        self._tokens: list[ProposedToken] = []

    @classmethod
    def of(cls, tokens: list[ProposedToken]) -> "Draws":
        """Draws of which everything is known."""
        made = cls([one.token_id for one in tokens])
        made._tokens = tokens
        return made

    @property
    def known(self) -> bool:
        """True when `tokens` computes nothing."""
        return self._find_out is None

    def tokens(self) -> list[ProposedToken]:
        """Everything about every draw. Reads the logits that `draw` was given."""
        if self._find_out is not None:
            self._tokens, self._find_out = self._find_out(), None
        return self._tokens


def propose(logits: Tensor, rows: Sequence[ProposeRow], num_valid_ids: int | None = None) -> list[ProposedToken]:
    """Draw one draft token for each row of `logits` [rows, vocab], for position len(prefix).

    Raises ValueError when logits and rows do not match.
    """
    return draw(logits, rows, num_valid_ids).tokens()


@torch.no_grad()
def draw(logits: Tensor, rows: Sequence[ProposeRow], num_valid_ids: int | None = None) -> Draws:
    """`propose`, with the ids first.

    Leaves the rest for later where that costs an accelerator no copy, and where no token needs a law: a
    block travels as soon as its last id is known, and its laws with it.
    """
    if not rows:
        return Draws([])
    if all(row.takes_maximum for row in rows):
        scores = valid_logits(logits, num_valid_ids)
        if scores.shape[0] != len(rows):
            raise ValueError(f"{scores.shape[0]} rows of logits for {len(rows)} rows")
        if scores.device.type != "cpu" or any(row.rule is VerificationRule.REJECTION for row in rows):
            return Draws.of(_best(scores, rows))
        return Draws(first_argmax(scores).tolist(), lambda: _best(scores, rows))
    blocks = [LawBlock(sampling=row.sampling, prefix=row.prefix, prompt_len=row.prompt_len) for row in rows]
    law = target_law(logits, blocks, num_valid_ids)
    shared = [i for i, row in enumerate(rows) if not row.transmits_law]
    sampled = [i for i, row in enumerate(rows) if row.transmits_law]
    proposed: dict[int, ProposedToken] = {}
    for chosen, draw_rows in ((shared, _with_target_noise), (sampled, _from_transmitted_law)):
        if chosen:
            own = law if len(chosen) == len(rows) else law.index_select(0, device_index(chosen, law.device))
            proposed.update(zip(chosen, draw_rows(own, [rows[i] for i in chosen]), strict=True))
    return Draws.of([proposed[i] for i in range(len(rows))])


def _with_target_noise(law: Tensor, rows: Sequence[ProposeRow]) -> list[ProposedToken]:
    """Coupled and greedy rows: the first maximum of log-weight plus the target's noise."""
    draws = [
        DrawRow(
            counter=None if row.sampling.greedy else _counter(row, Purpose.TARGET), truncated=row.sampling.truncates
        )
        for row in rows
    ]
    return _best(perturbed(law, draws), rows)


def _best(scores: Tensor, rows: Sequence[ProposeRow]) -> list[ProposedToken]:
    """The first maximum of each row of `scores` [rows, vocab], its margin, and the likeliest behind it."""
    num_ranked = min(max(2, *(row.num_ranked for row in rows)), scores.shape[1])
    first = first_argmax(scores).unsqueeze(1)
    values, ids = scores.topk(num_ranked, dim=1)
    firsts, values_of, ids_of = _on_host(first, values, ids)
    proposed = []
    for row, (token_id,), weights, ranked in zip(rows, firsts, values_of, ids_of, strict=True):
        if weights[-1] == -torch.inf:  # removed tokens are no outcome
            ranked = [one for one, weight in zip(ranked, weights, strict=True) if weight > -torch.inf] or [token_id]
        if ranked[0] != token_id:  # topk orders ties as it likes; the drawn token leads
            ranked = [token_id, *(one for one in ranked if one != token_id)]
        margin = weights[0] - weights[1] if len(weights) > 1 else torch.inf
        q = point_mass(token_id) if row.rule is VerificationRule.REJECTION else None
        proposed.append(ProposedToken(token_id, q, margin, tuple(ranked[: row.num_ranked])))
    return proposed


def _on_host(first: Tensor, values: Tensor, ids: Tensor) -> tuple[list[list[int]], list[list[float]], list[list[int]]]:
    """Three tensors of equal height as lists, by one copy from an accelerator."""
    if first.device.type == "cpu":
        return first.tolist(), values.tolist(), ids.tolist()
    width = values.shape[1]
    packed = torch.cat([first.double(), ids.double(), values.double()], dim=1).tolist()
    return (
        [[int(row[0])] for row in packed],
        [row[1 + width :] for row in packed],
        [[int(one) for one in row[1 : 1 + width]] for row in packed],
    )


def _from_transmitted_law(law: Tensor, rows: Sequence[ProposeRow]) -> list[ProposedToken]:
    """Sampled rows of the rejection rule: draw from the renormalised top-k that is transmitted."""
    width = min(max(row.q_top_k for row in rows), law.shape[1])
    weights, ids = law.topk(width, dim=1)  # [rows, width]
    limits = device_index([row.q_top_k for row in rows], law.device).unsqueeze(1)
    weights = weights.masked_fill(torch.arange(width, device=law.device) >= limits, -torch.inf)
    probs = weights.float().softmax(1)  # float32: what goes over the wire is what is drawn from
    seeds = seed_rows([_counter(row, Purpose.DRAFT) for row in rows], device=law.device)
    noise = gumbel_at(seeds.repeat_interleave(width, 0), ids.flatten()).view(ids.shape)
    scores = probs.log() + noise
    places = scores.argmax(1, keepdim=True)
    rivals = scores.scatter(1, places, -torch.inf).amax(1, keepdim=True)
    margins = (scores.gather(1, places) - rivals).double()
    # One copy to the host: [rows, margin | drawn id | ids | probabilities].
    drawn = ids.gather(1, places).double()
    packed = torch.cat([margins, drawn, ids.double(), probs.double()], dim=1).tolist()
    proposed = []
    for row, (margin, token_id, *rest) in zip(rows, packed, strict=True):
        kept = [(int(i), prob) for i, prob in zip(rest[:width], rest[width : 2 * width], strict=True) if prob > 0]
        q = SparseLaw(token_ids=tuple(i for i, _ in kept), probs=tuple(prob for _, prob in kept))
        proposed.append(ProposedToken(int(token_id), q, margin, q.token_ids[: row.num_ranked]))
    return proposed


def _counter(row: ProposeRow, purpose: Purpose) -> Counter:
    """The noise of the position that the row draws."""
    return Counter(key=row.noise_key, position=len(row.prefix), purpose=purpose)
