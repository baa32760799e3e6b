"""A model that one can compute by hand, with the interface of a real one.

It stores the *tokens* that it is given in its KV slots and computes logits from what it reads back
through the block table. A hole, a stale slot, a wrong position or a block freed too early changes
the text or raises: KV mistakes cannot hide.

Let s = sum of (i + 1) * token_i over the prefix (i counted from 0). The favourite next token is
f = 1 + (s + seed) mod (vocab_size - 1), and token t has logit -slope * ((t - f) mod vocab_size):
the ranks behind f are f + 1, f + 2 and so on.

Worked example: vocab_size 16, seed 3, prefix [5, 7] gives s = 1*5 + 2*7 = 19 and f = 1 + 22 mod 15
= 8: greedy goes 5 7 8; then s = 19 + 3*8 = 43, f = 1 + 46 mod 15 = 2, and so on. At slope 0.5 the
law is 0.39, 0.24, 0.14 … for the tokens f, f + 1, f + 2 …

A draft made with `agreement` below 1 takes f + 1 for the favourite and f for the second at a fixed
share of the prefixes (those with s * 2654435761 mod 2^32 at or above agreement * 2^32), so its
acceptance is known beforehand.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.base import EngineLimits, ForwardBatch, ForwardSlice

__all__ = ["ScriptedConfig", "ScriptedEngine"]

_EMPTY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedConfig:
    """Ordinary configuration of a scripted engine."""

    vocab_size: int = 64
    seed: int = 3
    slope: float = 0.5
    """Steepness of the law; the larger, the closer to greedy."""
    agreement: float = 1.0
    """Share of the prefixes where the favourite is the target's."""
    num_blocks: int = 256
    block_size: int = 4
    max_model_len: int = 512


class ScriptedEngine:
    """Implements `ModelEngine` with float64 logits."""

    def __init__(self, config: ScriptedConfig) -> None:
        self._config = config
        self._limits = EngineLimits(
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
        )
        slots = config.num_blocks * config.block_size
        self._tokens = np.full(slots, _EMPTY, dtype=np.int64)
        self._positions = np.full(slots, _EMPTY, dtype=np.int64)
        self.num_forwards = 0
        self.num_rows = 0

    @property
    def limits(self) -> EngineLimits:
        """What this engine can hold."""
        return self._limits

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the tokens, read every prefix back, return logits [sum of num_logits, vocab_size]."""
        self.num_forwards += 1
        self.num_rows += batch.num_rows
        owners: dict[int, int] = {}
        for index, one in enumerate(batch.slices):
            self._write(index, one, owners)
        rows = [row for one in batch.slices for row in self._logits(one)]
        return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, self._config.vocab_size)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy tokens and positions of whole blocks."""
        size = self._config.block_size
        for source, destination in pairs:
            for slots in (self._tokens, self._positions):
                slots[destination * size : (destination + 1) * size] = slots[source * size : (source + 1) * size]

    def close(self) -> None:
        """Nothing to release."""

    def favourite(self, prefix: list[int]) -> int:
        """The most likely token after `prefix`, by the formula above."""
        tokens = np.asarray(prefix, dtype=np.int64)
        return self._favourite(int(np.sum(tokens * np.arange(1, len(tokens) + 1))))

    def _favourite(self, s: int) -> int:
        first = self._first(s)
        return first if self._agrees(s) else (first + 1) % self._config.vocab_size

    def _first(self, s: int) -> int:
        return 1 + (s + self._config.seed) % (self._config.vocab_size - 1)

    def _agrees(self, s: int) -> bool:
        return (s * 2654435761) % 2**32 < self._config.agreement * 2**32

    def _slots(self, one: ForwardSlice, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        table = np.asarray(one.block_table, dtype=np.int64)
        if end > len(table) * self._config.block_size:
            raise ValueError(f"position {end - 1} lies beyond a block table of {len(table)} blocks")
        slots: np.ndarray = table[positions // self._config.block_size] * self._config.block_size
        return slots + positions % self._config.block_size

    def _write(self, index: int, one: ForwardSlice, owners: dict[int, int]) -> None:
        end = one.start + len(one.token_ids)
        if end > self._config.max_model_len:
            raise ValueError(f"position {end - 1} is at or above max_model_len {self._config.max_model_len}")
        tokens = np.asarray(one.token_ids, dtype=np.int64)
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self._config.vocab_size):
            raise ValueError(f"token ids {tokens.min()} … {tokens.max()} outside the vocabulary")
        slots = self._slots(one, one.start, end)
        for slot in slots.tolist():
            if owners.setdefault(slot, index) != index:
                raise ValueError(f"KV slot {slot} is written by two sequences in one step")
        self._tokens[slots] = tokens
        self._positions[slots] = np.arange(one.start, end)

    def _logits(self, one: ForwardSlice) -> list[np.ndarray]:
        end = one.start + len(one.token_ids)
        slots = self._slots(one, 0, end)
        if not np.array_equal(self._positions[slots], np.arange(end)):
            hole = int(np.argmax(self._positions[slots] != np.arange(end)))
            raise ValueError(f"KV at position {hole} was never written for this text")
        sums = np.cumsum(self._tokens[slots] * np.arange(1, end + 1))
        return [self._row(int(s)) for s in sums[end - one.num_logits : end]]

    def _row(self, s: int) -> np.ndarray:
        first = self._first(s)
        distance = (np.arange(self._config.vocab_size) - first) % self._config.vocab_size
        if not self._agrees(s):
            second = (first + 1) % self._config.vocab_size
            distance[[first, second]] = distance[[second, first]]
        return -self._config.slope * distance.astype(np.float64)
