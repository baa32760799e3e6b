"""The target's law p: the one function behind plain decoding, verify rows, residual and bonus.

A law is given as log-weights, the log-probabilities up to a constant per row: -inf where the law
is zero. Greedy rows have no temperature; their law is a point mass on the first maximum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.sampling import SamplingParams
from outrider.decoding.adjustments import LawBlock, adjust_
from outrider.decoding.transfer import device_index, device_tensor
from outrider.decoding.truncation import truncate_

__all__ = ["LawBlock", "takes_maximum", "target_law", "valid_logits"]

_SMALLEST_TEMPERATURE = 1e-30


def target_law(logits: Tensor, blocks: Sequence[LawBlock], num_valid_ids: int | None = None) -> Tensor:
    """The log-weights of each row's law after every sampling transform: [rows, num_valid_ids].

    `logits` [rows, vocab] holds the 1 + k_i rows of each block one after the other; columns from
    `num_valid_ids` on are padding and dropped. Every row is computed on its own, so the law of a row
    does not depend on the batch or block around it. `logits` are left as they are; when nothing
    changes them the result shares their memory, so treat it as read-only. Raises ValueError when
    rows and blocks do not match.
    """
    raw = valid_logits(logits, num_valid_ids)
    if sum(block.num_rows for block in blocks) != raw.shape[0]:
        raise ValueError(f"{raw.shape[0]} rows of logits for {[block.num_rows for block in blocks]} rows in blocks")
    adjusted = _adjusted(raw, blocks)
    if all(block.sampling.greedy for block in blocks):
        return adjusted
    params = [block.sampling for block in blocks for _ in range(block.num_rows)]
    law = _tempered(adjusted, params)
    cut = [row for row, sampling in enumerate(params) if sampling.truncates and not sampling.greedy]
    if len(cut) == len(params):
        truncate_(law, params)
    elif cut:
        index = device_index(cut, law.device)
        rows = law.index_select(0, index)
        truncate_(rows, [params[row] for row in cut])
        law.index_copy_(0, index, rows)
    return law


def takes_maximum(sampling: SamplingParams) -> bool:
    """True when the draw is the first maximum of the raw logits, whatever the prefix says.

    Such rows need no law at all: the commonest case, and on small steps the transforms cost more than
    the draw itself.
    """
    return (
        sampling.greedy and not sampling.logit_bias and not sampling.has_penalties and not sampling.suppressed_token_ids
    )


def valid_logits(logits: Tensor, num_valid_ids: int | None) -> Tensor:
    """The columns of real token ids, at least float32. Raises ValueError if there are fewer columns."""
    if logits.dim() != 2:
        raise ValueError(f"logits must be [rows, vocab], got {tuple(logits.shape)}")
    if num_valid_ids is not None:
        if not 0 < num_valid_ids <= logits.shape[1]:
            raise ValueError(f"num_valid_ids {num_valid_ids} outside 1 … {logits.shape[1]} columns of logits")
        logits = logits[:, :num_valid_ids]
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _adjusted(raw: Tensor, blocks: Sequence[LawBlock]) -> Tensor:
    """Logits with bias, penalties and suppression; `raw` itself when no block has any."""
    if not any(block.is_adjusted for block in blocks):
        return raw
    adjusted = raw.clone()
    start = 0
    for block in blocks:
        if block.is_adjusted:
            adjust_(adjusted[start : start + block.num_rows], block)
        start += block.num_rows
    return adjusted


def _tempered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """(logits - row maximum) / temperature, on a fresh tensor; temperature 1 for greedy rows.

    The maximum comes off first: it keeps its value, 0, and its ties at any temperature.
    """
    law = logits - logits.amax(1, keepdim=True)
    temperatures = [1.0 if p.greedy else max(p.temperature, _SMALLEST_TEMPERATURE) for p in params]
    if any(t != 1.0 for t in temperatures):
        law /= device_tensor(temperatures, dtype=law.dtype, device=law.device).unsqueeze(1)
    return law
