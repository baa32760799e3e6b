"""Logit changes that depend on a row's own prefix: bias, penalties, min_tokens suppression.

Each block is 1 + k consecutive rows of one sequence; row j follows the committed text and the first
j draft tokens, and its counts include those.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.sampling import SamplingParams
from outrider.decoding.transfer import device_index, device_tensor, to_device

__all__ = ["LawBlock", "adjust_"]

_FORCED_BIAS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LawBlock:
    """What shapes the laws of 1 + k consecutive rows of one sequence."""

    sampling: SamplingParams
    prefix: Sequence[int]
    """All committed token ids, prompt included; row 0 follows them. Read, never kept."""
    prompt_len: int
    """prefix[prompt_len:] is output, tokens of a resumed request included."""
    draft_token_ids: tuple[int, ...] = ()
    """Row j follows the first j of these."""

    @property
    def num_rows(self) -> int:
        """1 + k."""
        return 1 + len(self.draft_token_ids)

    @property
    def is_adjusted(self) -> bool:
        """True when some row's logits change before temperature is applied."""
        sampling = self.sampling
        return bool(sampling.logit_bias) or sampling.has_penalties or self.num_suppressed_rows > 0

    @property
    def num_suppressed_rows(self) -> int:
        """Rows, from the first on, that still lie below `min_tokens`."""
        if not self.sampling.suppressed_token_ids:
            return 0
        missing = self.sampling.min_tokens - (len(self.prefix) - self.prompt_len)
        return min(max(missing, 0), self.num_rows)


def adjust_(logits: Tensor, block: LawBlock) -> None:
    """Change the logits [1 + k, vocab] of one block in place, in the order of `SamplingParams`.

    Token ids at or beyond the vocabulary are ignored.
    """
    if block.sampling.logit_bias:
        _add_bias_(logits, block)
    if block.sampling.has_penalties:
        _penalize_(logits, block)
    if block.num_suppressed_rows:
        ids = [i for i in block.sampling.suppressed_token_ids if i < logits.shape[1]]
        logits[: block.num_suppressed_rows].index_fill_(1, device_index(ids, logits.device), -torch.inf)


def _add_bias_(logits: Tensor, block: LawBlock) -> None:
    """Add the biases. -100 removes a token and +100 leaves only such tokens, at any temperature."""
    entries = [(i, bias) for i, bias in block.sampling.logit_bias if i < logits.shape[1]]
    ids = [i for i, _ in entries]
    biases = [-torch.inf if bias <= -_FORCED_BIAS else bias for _, bias in entries]
    added = device_tensor(biases, dtype=logits.dtype, device=logits.device)
    logits.index_add_(1, device_index(ids, logits.device), added.expand(logits.shape[0], -1))
    forced = [i for i, bias in entries if bias >= _FORCED_BIAS]
    # A forced token that min_tokens suppresses must not leave a row without any token.
    free = [i for i in forced if i not in block.sampling.suppressed_token_ids]
    first_free_row = block.num_suppressed_rows
    _keep_only_(logits[:first_free_row], free)
    _keep_only_(logits[first_free_row:], forced)


def _keep_only_(logits: Tensor, token_ids: list[int]) -> None:
    """Remove every other token from the rows; no change without `token_ids`."""
    if token_ids:
        index = device_index(token_ids, logits.device)
        kept = logits.index_select(1, index)
        logits.fill_(-torch.inf).index_copy_(1, index, kept)


def _penalize_(logits: Tensor, block: LawBlock) -> None:
    """Apply repetition (prompt and output), then frequency and presence (output only) penalties."""
    sampling, (device, vocab, dtype) = block.sampling, (logits.device, logits.shape[1], logits.dtype)
    output = _token_tensor(block.prefix[block.prompt_len :], vocab)
    prompt = _token_tensor(block.prefix[: block.prompt_len] if sampling.repetition_penalty != 1.0 else (), vocab)
    drafted = torch.tensor(block.draft_token_ids, dtype=torch.int64)  # [k]
    ids = torch.cat([prompt, output, drafted]).unique()  # [ids], the only columns that change
    output_counts = output.bincount(minlength=vocab)[ids]
    in_prompt = prompt.bincount(minlength=vocab)[ids] > 0
    # Row j counts the drafted tokens before it: an exclusive running sum over the block.
    counts = torch.zeros(block.num_rows, len(ids), dtype=torch.int64)
    counts[1:] = (drafted.unsqueeze(1) == ids).cumsum(0)
    counts += output_counts
    repeated = to_device(in_prompt | (counts > 0), device)  # [1 + k, ids]
    ids, counts = to_device(ids, device), to_device(counts.to(dtype), device)

    values = logits[:, ids]
    penalty = sampling.repetition_penalty
    values = torch.where(repeated, torch.where(values > 0, values / penalty, values * penalty), values)
    values -= sampling.frequency_penalty * counts
    values -= sampling.presence_penalty * counts.clamp(max=1)
    logits[:, ids] = values


def _token_tensor(token_ids: Sequence[int], vocab: int) -> Tensor:
    """The ids that lie in the vocabulary: int64, at most [token_ids]."""
    ids = torch.tensor(token_ids, dtype=torch.int64)
    return ids[(ids >= 0) & (ids < vocab)]
