"""Gumbel noise over tensors, from the counter-based integer hash of `outrider.decoding.keys`.

A word w of 32 bits becomes u = (w + 1/2) * 2**-32 and g = -log(-log1p(-u)). Small u, where the
large values of g come from, keep their full precision in float32; u is held below 1, so g stays
within [-2.9, 22.9] and never reaches infinity (the textbook form does, at some positions).
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.decoding.keys import MASK_64, Counter, Purpose, stream_seeds
from outrider.decoding.transfer import to_device

__all__ = ["gumbel", "gumbel_at", "gumbel_rows", "seed_rows", "seed_runs", "words_to_gumbel"]

_SIGN_32 = 1 << 31
_RANGE_32 = 1 << 32
# So few seeds are mixed sooner one by one than by calls on arrays.
_FEW_ROWS = 12
_BELOW_ONE = 1.0 - 2.0**-24


def gumbel(key: int, position: int, purpose: Purpose, token_ids: Tensor | int) -> Tensor:
    """Standard Gumbel noise of one position, float32, of the same shape as `token_ids`.

    An integer n stands for the ids 0 … n - 1. Any subset of ids gets the same values as the whole.
    """
    ids = torch.arange(token_ids) if isinstance(token_ids, int) else token_ids
    seeds = seed_rows([Counter(key=key, position=position, purpose=purpose)], device=ids.device)
    return _noise(_premix(ids.reshape(1, -1)), seeds).view(ids.shape)


def seed_rows(counters: Sequence[Counter], *, device: torch.device) -> Tensor:
    """The streams of several positions as int32 halves, low and high: [rows, 2]."""
    if len(counters) <= _FEW_ROWS:
        return _halves(np.array([counter.seed for counter in counters], dtype=np.uint64), device)
    keys = np.array([counter.key & MASK_64 for counter in counters], dtype=np.uint64)
    positions = np.array([counter.position for counter in counters], dtype=np.uint64)
    purposes = np.array([counter.purpose for counter in counters], dtype=np.uint64)
    return _halves(stream_seeds(keys, positions, purposes), device)


def seed_runs(keys: Sequence[int], starts: Sequence[int], counts: Sequence[int], purpose: Purpose) -> Tensor:
    """`seed_rows` of runs of positions, starts[i] … starts[i] + counts[i] - 1 under keys[i], on the host."""
    if sum(counts) <= _FEW_ROWS:
        runs = zip(keys, starts, counts, strict=True)
        every = [
            Counter(key=key, position=position, purpose=purpose)
            for key, start, count in runs
            for position in range(start, start + count)
        ]
        return seed_rows(every, device=torch.device("cpu"))
    lengths = np.array(counts)
    first = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) + np.repeat(np.array(starts) - first, lengths)
    every_key = np.repeat(np.array([key & MASK_64 for key in keys], dtype=np.uint64), lengths)
    seeds = stream_seeds(every_key, positions.astype(np.uint64), np.uint64(purpose))
    return _halves(seeds, torch.device("cpu"))


def _halves(seeds: NDArray[np.uint64], device: torch.device) -> Tensor:
    low_high = seeds.astype("<u8", copy=False).view("<i4").reshape(-1, 2)
    return to_device(torch.from_numpy(low_high), device)


def gumbel_rows(seeds: Tensor, num_tokens: int) -> Tensor:
    """Noise for token ids 0 … num_tokens - 1 of every row of `seeds` [rows, 2]: [rows, num_tokens]."""
    ids = torch.arange(num_tokens, dtype=torch.int32, device=seeds.device)
    return _noise(_premix(ids), seeds)


def gumbel_at(seeds: Tensor, token_ids: Tensor) -> Tensor:
    """Noise for single tokens: seeds [tokens, 2] and token_ids [tokens] give [tokens]."""
    return _noise(_premix(token_ids).unsqueeze(1), seeds).squeeze(1)


def words_to_gumbel(words: Tensor) -> Tensor:
    """Random 32-bit words (int32 bit patterns, any shape) to finite float32 Gumbel noise."""
    return _to_gumbel(words, torch.empty_like(words, dtype=torch.float32))


def _to_gumbel(words: Tensor, noise: Tensor) -> Tensor:
    """`words_to_gumbel` into `noise`, a float32 tensor of the same shape."""
    minus_u = noise.copy_(words.view(torch.uint32)).add_(0.5).mul_(-(2.0**-32))
    exponential = minus_u.clamp_(min=-_BELOW_ONE).log1p_().neg_()
    return exponential.log_().neg_()


def _premix(token_ids: Tensor) -> Tensor:
    """The part of the hash that does not depend on the row, on a fresh int32 tensor of the same shape."""
    words = token_ids.to(torch.int32, copy=True)
    scratch = torch.empty_like(words)
    _xor_shift(words, 16, scratch)
    words.mul_(_signed(0x21F0AAAD))
    _xor_shift(words, 15, scratch)
    words.mul_(_signed(0x735A2D97))
    return _xor_shift(words, 15, scratch)


def _noise(premixed: Tensor, seeds: Tensor) -> Tensor:
    """Noise [rows, tokens] from premixed ids ([tokens] or [rows, tokens]) and seeds [rows, 2].

    int32 products wrap around modulo 2**32, which is what the definition in `keys.hash_word` asks.
    Everything happens in two buffers: fresh memory costs more than the arithmetic on a CPU.
    """
    words = premixed ^ seeds[:, :1]
    scratch = torch.empty_like(words)
    words.mul_(_signed(0x7FEB352D))
    _xor_shift(words, 15, scratch)
    words.bitwise_xor_(seeds[:, 1:])
    words.mul_(_signed(0x31848BAB))
    _xor_shift(words, 14, scratch)
    words.mul_(_signed(0x2C1B3C6D))
    _xor_shift(words, 16, scratch)
    return _to_gumbel(words, scratch.view(torch.float32))


def _xor_shift(words: Tensor, bits: int, scratch: Tensor) -> Tensor:
    """words ^= words >> bits, in place; the mask undoes the sign extension of int32's shift."""
    torch.bitwise_right_shift(words, bits, out=scratch)
    scratch.bitwise_and_((1 << (32 - bits)) - 1)
    return words.bitwise_xor_(scratch)


def _signed(word: int) -> int:
    """The int32 value that has the bits of `word`."""
    return word - _RANGE_32 if word >= _SIGN_32 else word
