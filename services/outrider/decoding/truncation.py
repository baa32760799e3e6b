"""Top-k, top-p and min-p on rows of log-weights, exact and without sorting the vocabulary.

All three keep the most likely tokens down to some cut, with ties resolved by token id (lower ids
stay). So each row needs only a threshold and the number of tied tokens that stay; both follow from
the largest few values of the row. A row whose nucleus is larger than that falls back to sorting
every token that could belong to it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.sampling import SamplingParams

__all__ = ["largest_values", "truncate_"]

_NUCLEUS_GUESS = 96
_TILE = 64


def truncate_(log_weights: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set the log-weights [rows, vocab] of removed tokens to -inf, in place.

    Rows must have their temperature applied and 0 as their maximum. `params` has one entry a row.
    """
    vocab = log_weights.shape[1]
    floors = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    floor = torch.tensor(floors, dtype=log_weights.dtype).to(log_weights.device)  # [rows]
    ranked = [r for r, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1]
    thresholds, spare = floor, {}
    if ranked:
        rows = log_weights if len(ranked) == len(params) else log_weights[ranked]
        cuts, num_kept = _rank_cuts(rows, [params[r] for r in ranked])
        spare = _surplus_ties(rows, cuts, num_kept)
        thresholds = floor.clone()
        thresholds[ranked] = torch.maximum(floor[ranked], cuts)
    for index, num_ties in spare.items():
        row = log_weights[ranked[index]]
        if bool(cuts[index] >= floor[ranked[index]]):
            tied = (row == cuts[index]).nonzero().squeeze(1)
            row[tied[num_ties:]] = -torch.inf
    log_weights.masked_fill_(log_weights < thresholds.unsqueeze(1), -torch.inf)


def largest_values(rows: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row [rows, vocab], best first: [rows, count].

    They lie in the `count` tiles with the largest maxima, so only those are searched.
    """
    vocab = rows.shape[1]
    num_tiles = vocab // _TILE
    if count * 4 > num_tiles:
        return rows.topk(min(count, vocab), dim=1).values
    tiles = rows[:, : num_tiles * _TILE].view(-1, num_tiles, _TILE)  # [rows, tiles, 64]
    best = tiles.amax(2).topk(count, dim=1).indices  # [rows, count]
    picked = tiles.gather(1, best.unsqueeze(2).expand(-1, -1, _TILE)).flatten(1)
    return torch.cat([picked, rows[:, num_tiles * _TILE :]], dim=1).topk(count, dim=1).values


def _rank_cuts(rows: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Per row the smallest kept value [rows] and how many tokens top-k and top-p keep [rows]."""
    vocab = rows.shape[1]
    limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    count = max(limit + 1 if limit < vocab else _NUCLEUS_GUESS for limit in limits)
    values = largest_values(rows, min(count, vocab))  # [rows, count]
    count = values.shape[1]
    limit = torch.tensor(limits, device=rows.device)
    num_kept = limit.clamp(max=count)
    if any(p.top_p < 1 for p in params):
        weights = values.double().exp()
        weights *= torch.arange(count, device=rows.device) < limit.unsqueeze(1)
        # The nucleus is taken from the law that top-k left.
        total = weights.sum(1)
        if max(limits) > count:
            total = torch.where(limit <= count, total, rows.exp().sum(1).double())
        top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64).to(rows.device)
        goal = torch.where(top_p < 1, top_p * total, torch.inf)
        mass = weights.cumsum(1)
        nucleus = ((mass - weights) < goal.unsqueeze(1)).sum(1)
        num_kept = torch.minimum(num_kept, nucleus).clamp_(min=1)
        short = (mass[:, -1] < goal) & (limit > count)
        cuts = values.gather(1, (num_kept - 1).unsqueeze(1)).squeeze(1)
        for index in short.nonzero().squeeze(1).tolist():
            cuts[index], num_kept[index] = _large_nucleus(rows[index], float(goal[index]), params[index].top_p)
        return cuts, num_kept
    return values.gather(1, (num_kept - 1).unsqueeze(1)).squeeze(1), num_kept


def _large_nucleus(row: Tensor, goal: float, top_p: float) -> tuple[Tensor, int]:
    """Smallest kept value and size of the set of most likely tokens whose weight reaches `goal`.

    Tokens below (1 - top_p) / (2 vocab) hold together less than what top_p leaves out, so none of
    them belongs to it and sorting the others is enough.
    """
    smallest = math.log(goal / top_p * (1 - top_p) / (2 * row.shape[0]))
    for candidates in (row[row >= smallest], row):
        values = candidates.sort(descending=True).values
        weights = values.double().exp()
        mass = weights.cumsum(0)
        if float(mass[-1]) >= goal:
            break
    num_kept = max(int(((mass - weights) < goal).sum()), 1)
    return values[num_kept - 1], num_kept


def _surplus_ties(rows: Tensor, cuts: Tensor, num_kept: Tensor) -> dict[int, int]:
    """Rows with more tokens at the cut than may stay: row index to the number that stays."""
    reaching = (rows >= cuts.unsqueeze(1)).sum(1)
    surplus: dict[int, int] = {}
    for index in ((reaching > num_kept) & (cuts > -torch.inf)).nonzero().squeeze(1).tolist():
        above = (rows[index] > cuts[index]).sum()
        surplus[index] = int(num_kept[index] - above)
    return surplus
