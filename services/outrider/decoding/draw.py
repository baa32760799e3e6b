"""Drawing by Gumbel argmax: a token is the first maximum of log-weight plus noise.

The same draw serves the target, the draft under the coupled rule, and the recovered token; only
the counter differs. Greedy rows add no noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outrider.decoding.keys import Counter
from outrider.decoding.noise import gumbel_at, gumbel_rows, seed_rows
from outrider.decoding.transfer import device_index

__all__ = ["DrawRow", "first_argmax", "perturbed", "with_noise"]


_TILE = 64
_MIN_TILES = 32  # below that one pass is cheaper than the calls that save half of it


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRow:
    """How one row is perturbed."""

    counter: Counter | None
    """Names the noise; None adds none (greedy)."""
    truncated: bool
    """True when the law keeps few tokens, so that noise is made for those alone. Changes no value."""


def perturbed(log_weights: Tensor, rows: Sequence[DrawRow]) -> Tensor:
    """Log-weights plus Gumbel noise: [rows, vocab]. `log_weights` themselves if no row has noise.

    A row's values depend on its own log-weights and counter alone.
    """
    noisy = [i for i, row in enumerate(rows) if row.counter is not None]
    if not noisy:
        return log_weights
    seeds = seed_rows([row.counter for row in rows if row.counter is not None], device=log_weights.device)
    return with_noise(log_weights, seeds, noisy, [rows[i].truncated for i in noisy])


def with_noise(log_weights: Tensor, seeds: Tensor, noisy: Sequence[int], truncated: Sequence[bool]) -> Tensor:
    """`perturbed` where the rows with noise, ascending, have their seeds [noisy, 2] already."""
    # Which tokens are kept is known on the device only: the host would have to wait for it.
    may_look = log_weights.device.type == "cpu" and any(truncated)
    dense = [i for i, cut in zip(noisy, truncated, strict=True) if not cut] if may_look else noisy
    sparse = [i for i, cut in zip(noisy, truncated, strict=True) if cut] if may_look else []
    if len(dense) == log_weights.shape[0]:
        return gumbel_rows(seeds, log_weights.shape[1]).to(log_weights.dtype).add_(log_weights)
    scores = log_weights.clone()
    index = partial(device_index, device=log_weights.device)
    place = {row: index for index, row in enumerate(noisy)}
    if dense:
        noise = gumbel_rows(seeds.index_select(0, index([place[i] for i in dense])), log_weights.shape[1])
        scores.index_add_(0, index(dense), noise.to(scores.dtype))
    if sparse:
        candidates = log_weights if len(sparse) == log_weights.shape[0] else log_weights.index_select(0, index(sparse))
        kept_row, kept_id = (candidates > -torch.inf).nonzero().unbind(1)
        noise = gumbel_at(seeds.index_select(0, index([place[i] for i in sparse]))[kept_row], kept_id)
        target_row = index(sparse)[kept_row]
        scores[target_row, kept_id] += noise.to(scores.dtype)
    return scores


def first_argmax(scores: Tensor) -> Tensor:
    """The lowest index of each row's maximum: scores [rows, vocab] give [rows].

    Looks for the first tile with the maximum, then inside it, which saves most of argmax's time.
    """
    vocab = scores.shape[1]
    num_tiles = vocab // _TILE
    if num_tiles < _MIN_TILES:
        return scores.argmax(1)
    tiles = scores[:, : num_tiles * _TILE].view(-1, num_tiles, _TILE)  # [rows, tiles, 64]
    best, tile = tiles.amax(2).max(1)  # [rows], the first tile among equals
    inside = tiles.gather(1, tile.view(-1, 1, 1).expand(-1, 1, _TILE)).squeeze(1).argmax(1)
    index = tile * _TILE + inside
    if num_tiles * _TILE < vocab:
        rest, place = scores[:, num_tiles * _TILE :].max(1)
        index = torch.where(rest > best, num_tiles * _TILE + place, index)
    return index
