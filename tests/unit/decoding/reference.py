"""The law again, by the book: plain Python, one row, a full sort. Slow and easy to check by eye.

Also a hand-made language model whose next-token logits depend on the last two tokens.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.sampling import SamplingParams


def reference_law(
    logits: Sequence[float], sampling: SamplingParams, prefix: Sequence[int] = (), prompt_len: int = 0
) -> list[float]:
    """Probabilities after every transform, in the order that `SamplingParams` documents."""
    z = list(logits)
    output = list(prefix[prompt_len:])
    suppressed = set(sampling.suppressed_token_ids) if len(output) < sampling.min_tokens else set()
    for token_id, bias in sampling.logit_bias:
        z[token_id] = z[token_id] + bias if bias > -100 else -math.inf
    forced = {token_id for token_id, bias in sampling.logit_bias if bias == 100} - suppressed
    if forced:
        z = [value if i in forced else -math.inf for i, value in enumerate(z)]
    for i in set(prefix):
        z[i] = z[i] / sampling.repetition_penalty if z[i] > 0 else z[i] * sampling.repetition_penalty
    for i in set(output):
        z[i] -= sampling.frequency_penalty * output.count(i) + sampling.presence_penalty
    for i in suppressed:
        z[i] = -math.inf
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    if sampling.greedy:
        return [float(i == order[0]) for i in range(len(z))]
    weights = [math.exp((value - z[order[0]]) / sampling.temperature) for value in z]
    if sampling.top_k:
        order = order[: sampling.top_k]
    total, mass, kept = sum(weights[i] for i in order), 0.0, list[int]()
    for i in order:
        if kept and mass >= sampling.top_p * total and sampling.top_p < 1:
            break
        kept.append(i)
        mass += weights[i]
    kept = [i for i in kept if weights[i] >= sampling.min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in set(kept) else 0.0 for i in range(len(z))]


class BigramModel:
    """Logits that depend on the last two tokens: float64, [vocab], the same for a seed."""

    def __init__(self, *, vocab: int, seed: int, scale: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = scale * torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64)

    def logits(self, prefix: Sequence[int]) -> Tensor:
        return self.table[prefix[-2], prefix[-1]]

    def block_logits(self, prefix: Sequence[int], draft: Sequence[int]) -> Tensor:
        """Rows of one verify step: [1 + k, vocab]."""
        text = [*prefix, *draft]
        return self.table[text[len(prefix) - 2 : -1], text[len(prefix) - 1 :]]

    def batch_logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """One row behind each text: [texts, vocab]."""
        return self.table[[text[-2] for text in texts], [text[-1] for text in texts]]
