"""Noise keys and counters: which random number belongs to which token, in plain integers.

A random number depends on (noise key, absolute position, purpose, token id) and on nothing else:
not on the step, the batch, the block, the replica or the device. `outrider.decoding.noise` computes
the same words over tensors; `hash_word` is their definition.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["MASK_64", "Counter", "Purpose", "derive_key", "hash_word", "stream_seeds", "uniform"]

_MASK_32 = 0xFFFFFFFF
MASK_64 = 0xFFFFFFFFFFFFFFFF
"""Keys count modulo 2**64."""
_GOLDEN = 0x9E3779B97F4A7C15
_PURPOSE_STEP = 0xD1342543DE82EF95


class Purpose(IntEnum):
    """What a random number is for. Numbers of different purposes are independent."""

    TARGET = 0
    """The target's own draw; the draft uses the same noise under the coupled rule."""
    ACCEPT = 1
    """The uniform that the ratio p/q is compared with (rejection rule)."""
    RESIDUAL = 2
    """The draw of the recovered token (rejection rule)."""
    DRAFT = 3
    """The drafter's own draw (rejection rule). Shared noise would bias the ratio test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """Names the random numbers of one position: one for each token id."""

    key: int
    """The noise key of the sequence, 64 bits, from `derive_key`."""
    position: int
    """Counted from the first prompt token, so it does not depend on rounds or failover."""
    purpose: Purpose

    @property
    def seed(self) -> int:
        """64 bits that select the stream over token ids."""
        mixed = _mix_64(_mix_64(self.key & MASK_64) + _GOLDEN * (self.position + 1))
        return _mix_64(mixed + _PURPOSE_STEP * (self.purpose + 1))


def derive_key(seed: int, sample_index: int) -> int:
    """The 64-bit noise key of sample `sample_index` (0 … n - 1) of a request seeded with `seed`.

    Distinct sample indices of one seed never share a key. Seeds are taken modulo 2**64.
    """
    return _mix_64(_mix_64((seed + _GOLDEN) & MASK_64) + _PURPOSE_STEP * sample_index)


def hash_word(seed: int, token_id: int) -> int:
    """The 32-bit random word of `token_id` in the stream selected by `seed` (a `Counter.seed`)."""
    low, high = seed & _MASK_32, seed >> 32
    word = token_id ^ (token_id >> 16)
    word = (word * 0x21F0AAAD) & _MASK_32
    word ^= word >> 15
    word = (word * 0x735A2D97) & _MASK_32
    word ^= word >> 15  # mixed before the seed enters: streams are no shifted copies of each other
    word ^= low
    word = (word * 0x7FEB352D) & _MASK_32
    word ^= word >> 15
    word ^= high
    word = (word * 0x31848BAB) & _MASK_32
    word ^= word >> 14
    word = (word * 0x2C1B3C6D) & _MASK_32
    return word ^ (word >> 16)


def uniform(key: int, position: int, purpose: Purpose) -> float:
    """One uniform number strictly between 0 and 1, with 52 random bits."""
    word = Counter(key=key, position=position, purpose=purpose).seed
    return ((word >> 12) + 0.5) * 2.0**-52


def stream_seeds(
    keys: NDArray[np.uint64], positions: NDArray[np.uint64], purposes: NDArray[np.uint64] | np.uint64
) -> NDArray[np.uint64]:
    """`Counter.seed` of many counters at once, each array [counters]; integers of 64 bits wrap around."""
    mixed = _mix_array(_mix_array(keys) + np.uint64(_GOLDEN) * (positions + np.uint64(1)))
    return _mix_array(mixed + np.uint64(_PURPOSE_STEP) * (purposes + np.uint64(1)))


def _mix_array(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix_64` of every word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mix_64(word: int) -> int:
    """A bijection of 64-bit words in which every input bit reaches every output bit (splitmix64's finalizer)."""
    word &= MASK_64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK_64
    return word ^ (word >> 31)
