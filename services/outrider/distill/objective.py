"""What the draft learns from a labelled position: the target's token, law and last hidden state."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["Labels", "LossWeights", "blended_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """How the parts are blended."""

    likeliest: float = 0.4
    """Cross-entropy against the target's likeliest token: what greedy decoding verifies."""
    law: float = 1.0
    """Cross-entropy against the target's top-k law, renormalised: what sampling verifies."""
    hidden: float = 0.5
    """Squared distance to the target's last hidden state, relative to its size: hundreds of numbers
    a position, where a law has a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Of n positions."""

    columns: Tensor
    """[n, k], int64: the target's likeliest tokens as columns of the draft's vocabulary, -1 outside it."""
    logp: Tensor
    """[n, k], float32: their log-probabilities."""
    hidden: Tensor
    """[n, hidden_size]: the target's last hidden state."""
    weight: Tensor
    """[n], float32: how much a position counts."""


def blended_loss(hidden: Tensor, head: Tensor, labels: Labels, weights: LossWeights) -> tuple[Tensor, Tensor]:
    """The loss of hidden states [n, hidden_size] under the reduced head [v, hidden_size].

    Returns the loss (a scalar) and, for reports, the weighted share of positions whose likeliest
    token agrees. A token outside the draft's vocabulary is left out of the law; a position whose
    likeliest token is outside counts as no agreement and teaches only the rest.
    """
    with torch.autocast(hidden.device.type, torch.bfloat16):
        scores = linear(hidden, head).float()  # [n, v]
    known = labels.columns >= 0
    columns = labels.columns.clamp_min(0)
    normaliser = scores.logsumexp(-1, keepdim=True)
    log_q = scores.gather(1, columns) - normaliser  # [n, k]
    p = labels.logp.exp() * known
    law = -(p * log_q).sum(-1) / p.sum(-1).clamp_min(1e-3)
    best = -log_q[:, 0] * known[:, 0]
    target = labels.hidden.float()
    distance = (hidden.float() - target).square().mean(-1) / target.square().mean(-1).clamp_min(1e-6)
    each = weights.law * law + weights.likeliest * best + weights.hidden * distance
    total = labels.weight.sum().clamp_min(1e-6)
    agrees = (scores.argmax(-1) == labels.columns[:, 0]).float()
    return (each * labels.weight).sum() / total, (agrees * labels.weight).sum().detach() / total
