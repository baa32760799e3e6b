"""Top-k, top-p and min-p on rows of log-weights, exact and without sorting the vocabulary.

All three keep the most likely tokens down to some cut, with ties resolved by token id (lower ids
stay). So each row needs only a threshold and the number of tied tokens that stay; both follow from
the largest few values of the row. Only rows whose nucleus is larger than that are searched deeper,
down to the whole vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.sampling import SamplingParams
from outrider.decoding.transfer import device_index, device_tensor

__all__ = ["largest_values", "truncate_"]

_NUCLEUS_DEPTHS = (96, 512, 4096)
_TILE = 64


def truncate_(log_weights: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set the log-weights [rows, vocab] of removed tokens to -inf, in place.

    Rows must have their temperature applied and 0 as their maximum. `params` has one entry a row.
    """
    vocab = log_weights.shape[1]
    floors = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    floor = device_tensor(floors, dtype=log_weights.dtype, device=log_weights.device)  # [rows]
    ranked = [r for r, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1]
    thresholds, spare = floor, {}
    if ranked:
        ranked_index = device_index(ranked, log_weights.device)
        rows = log_weights if len(ranked) == len(params) else log_weights.index_select(0, ranked_index)
        cuts, num_kept = _rank_cuts(rows, [params[r] for r in ranked])
        spare = _surplus_ties(rows, cuts, num_kept)
        thresholds = floor.index_copy(0, ranked_index, torch.maximum(floor.index_select(0, ranked_index), cuts))
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
    """Per row the smallest kept value [rows] and how many tokens top-k and top-p keep [rows].

    Searches the largest values of every row, then deeper ones for the rows whose nucleus goes on.
    """
    vocab = rows.shape[1]
    limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    # One more than top-k keeps, so that its cut seldom is the last value that was looked at.
    depth = min(max(limit + 1 if limit < vocab else _NUCLEUS_DEPTHS[0] for limit in limits), vocab)
    limit = device_index(limits, rows.device)
    top_p = device_tensor([p.top_p for p in params], dtype=torch.float64, device=rows.device)
    total = rows.exp().sum(1).double() if max(limits) == vocab else torch.zeros_like(top_p)
    cuts, num_kept, done = _search(rows, limit, top_p, total, depth)
    for deeper in (*_NUCLEUS_DEPTHS[1:], vocab):
        if not depth < deeper <= vocab:
            continue
        pending = (~done).nonzero().squeeze(1)
        if pending.shape[0] == 0:
            break
        found = _search(rows[pending], limit[pending], top_p[pending], total[pending], deeper)
        cuts[pending], num_kept[pending], done[pending] = found
    return cuts, num_kept


def _search(rows: Tensor, limit: Tensor, top_p: Tensor, total: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut [rows], tokens kept [rows], and whether `depth` values were enough to know them [rows].

    `limit` [rows] is top-k, or the vocabulary without it; `total` [rows] is the weight of rows
    without top-k.
    """
    values = largest_values(rows, depth)  # [rows, depth]
    weights = values.double().exp()
    weights *= torch.arange(depth, device=rows.device) < limit.unsqueeze(1)
    mass = weights.cumsum(1)
    cut_by_top_k = limit <= depth
    # The nucleus is taken from the law that top-k left.
    total = torch.where(cut_by_top_k, mass[:, -1], total)
    goal = torch.where(top_p < 1, top_p * total, torch.inf)
    nucleus = ((mass - weights) < goal.unsqueeze(1)).sum(1)
    num_kept = torch.minimum(nucleus, limit).clamp_(min=1)
    cuts = values.gather(1, (num_kept - 1).unsqueeze(1)).squeeze(1)
    return cuts, num_kept, cut_by_top_k | (mass[:, -1] >= goal)


def _surplus_ties(rows: Tensor, cuts: Tensor, num_kept: Tensor) -> dict[int, int]:
    """Rows with more tokens at the cut than may stay: row index to the number that stays."""
    reaching = (rows >= cuts.unsqueeze(1)).sum(1)
    surplus: dict[int, int] = {}
    for index in ((reaching > num_kept) & (cuts > -torch.inf)).nonzero().squeeze(1).tolist():
        above = (rows[index] > cuts[index]).sum()
        surplus[index] = int(num_kept[index] - above)
    return surplus
