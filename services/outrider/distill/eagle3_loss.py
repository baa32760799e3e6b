"""Training-time test: the head is trained on its own outputs, as it will be used.

At depth 0 every row reads the target's features. At depth d row p stands for the d-th drafted token
behind position p - d: it reads the output that depth d - 1 had at row p - 1, and attends to what it
would find in its KV then: keys of depth 0 up to row p - d, of depth 1 at p - d + 1, … of depth d at
p itself. (Li et al. 2025, arXiv 2503.01840, section 3.2.)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.engine.eagle3.model import Eagle3Head, rotate

__all__ = ["HeadBatch", "HeadLoss", "HeadLossWeights", "head_loss", "head_outputs"]

_MASKED = -1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBatch:
    """Texts side by side, padded to equal length; row p belongs to the token at position p."""

    embeddings: Tensor
    """Of each token; [batch, length, hidden]."""
    features: Tensor
    """The target's three features of position p - 1; row 0 is not used. [batch, length, 3 * target_hidden]."""
    teacher_ids: Tensor
    """Draft ids of the target's likeliest tokens for position p + 1, best first; [batch, length, k]."""
    teacher_probs: Tensor
    """Their probabilities; 0 where the token is outside the reduced vocabulary. [batch, length, k]."""
    teacher_hidden: Tensor
    """The target's last hidden state at p, behind its norm; [batch, length, hidden]."""
    weight: Tensor
    """How much a row is worth learning; 0 where nothing is known. [batch, length]."""
    num_tokens: int
    """Tokens without padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLossWeights:
    """How the parts are blended."""

    likeliest: float = 0.5
    """Cross-entropy to the target's first choice: what greedy decoding verifies."""
    law: float = 0.5
    """Cross-entropy to its law, as far as it is known: what sampling verifies."""
    hidden: float = 0.5
    """Squared distance to its last hidden state, relative to that state's size."""
    decay: float = 0.8
    """What a drafted token counts beside the one before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoss:
    """Sum to minimise, and sums per depth, for reports."""

    loss: Tensor
    agreed: tuple[float, ...]
    """Weight of the rows whose first choice is the target's first choice, by depth."""
    rows: tuple[float, ...]
    """Weight of all rows, by depth; the agreement at depth d is agreed[d] / rows[d]."""


def head_loss(
    head: Eagle3Head,
    batch: HeadBatch,
    cos_sin: tuple[Tensor, Tensor],
    *,
    depths: int,
    weights: HeadLossWeights,
) -> HeadLoss:
    """The loss over `depths` drafted tokens. `cos_sin` [length, head_dim] are positions' rotary factors."""
    total = batch.weight.new_zeros(())
    agreed, rows = [], []
    outputs = head_outputs(head, batch.embeddings, batch.features, cos_sin, depths=depths)
    for depth, output in enumerate(outputs):
        counted = batch.weight > 0
        counted[:, : depth + 1] = False  # row 0 has no features; the rows behind it no self-fed ones yet
        loss, right = _row_losses(head, output[counted], batch, counted, weights)
        weight = batch.weight[counted]
        total = total + weights.decay**depth * (loss * weight).sum() / weight.sum().clamp_min(1e-6)
        agreed.append(float((right * weight).sum()))
        rows.append(float(weight.sum()))
    return HeadLoss(loss=total, agreed=tuple(agreed), rows=tuple(rows))


def head_outputs(
    head: Eagle3Head, embeddings: Tensor, features: Tensor, cos_sin: tuple[Tensor, Tensor], *, depths: int
) -> Iterator[Tensor]:
    """The head's outputs [batch, length, hidden] at depth 0, 1, …; at depth d the first d + 1 rows mean nothing.

    embeddings [batch, length, hidden] and features [batch, length, 3 * target_hidden] as in `HeadBatch`.
    """
    hidden = head.fuse(features)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for _ in range(depths):
        query, key, value = head.project(head.attention_input(embeddings, hidden))
        keys.append(rotate(key, *cos_sin))
        values.append(value)
        output = head.finish(hidden, _attend(rotate(query, *cos_sin), keys, values))
        yield output
        hidden = pad(output, (0, 0, 1, 0))[:, :-1]  # row p reads what row p - 1 gave


def _row_losses(
    head: Eagle3Head, outputs: Tensor, batch: HeadBatch, counted: Tensor, weights: HeadLossWeights
) -> tuple[Tensor, Tensor]:
    """Loss [n] of the counted rows, and where the first choices agree [n]."""
    normed = head.norm(outputs)
    logits = head.lm_head(normed)  # [n, draft_vocab]
    normaliser = logits.float().logsumexp(-1, keepdim=True)
    ids, probs = batch.teacher_ids[counted], batch.teacher_probs[counted]  # [n, k]
    log_q = logits.gather(1, ids).float() - normaliser
    known = probs[:, 0] > 0  # a first choice that cannot be drafted teaches nothing
    target = batch.teacher_hidden[counted].float()
    distance = (normed.float() - target).square().mean(-1) / target.square().mean(-1).clamp_min(1e-6)
    law = -(probs * log_q).sum(1) / probs.sum(1).clamp_min(1e-3)
    loss = weights.law * law - weights.likeliest * known * log_q[:, 0] + weights.hidden * distance
    right = (logits.detach().argmax(1) == ids[:, 0]) & known
    return loss, right


def _attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attention of the newest depth over all depths: [batch, length, heads, head_dim] to [..., heads * head_dim]."""
    depth = len(keys) - 1
    batch, length, heads, size = query.shape
    kv_heads = keys[0].shape[2]
    grouped = query.unflatten(2, (kv_heads, heads // kv_heads)) / math.sqrt(size)  # [b, l, kv, shared, d]
    scores = torch.einsum("blksd,bmkd->bkslm", grouped, keys[0])
    rows = torch.arange(length, device=query.device)
    scores = scores.masked_fill(rows[None, :] > rows[:, None] - depth, _MASKED)
    # Row 0 is no row of the head: it has no features.
    scores[..., 0] = _MASKED
    own = [_delayed(one, depth - index) for index, one in enumerate(keys)][1:]
    own_values = [_delayed(one, depth - index) for index, one in enumerate(values)][1:]
    diagonal = [torch.einsum("blksd,blkd->bksl", grouped, one).unsqueeze(-1) for one in own]
    weights = torch.cat([scores, *diagonal], dim=-1).float().softmax(-1).to(query.dtype)
    attended = torch.einsum("bkslm,bmkd->blksd", weights[..., :length], values[0])
    for index, one in enumerate(own_values):
        attended = attended + weights[..., length + index].permute(0, 3, 1, 2).unsqueeze(-1) * one.unsqueeze(3)
    return attended.reshape(batch, length, heads * size)


def _delayed(rows: Tensor, steps: int) -> Tensor:
    """Row p becomes row p - steps; [batch, length, kv_heads, head_dim]."""
    return rows if steps == 0 else pad(rows, (0, 0, 0, 0, steps, 0))[:, :-steps]
