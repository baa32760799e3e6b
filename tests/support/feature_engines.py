"""Scripted engines that exchange features: a row's feature tells the prefix that it stands for."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from outrider.engine.base import ForwardBatch, ForwardSlice
from outrider.engine.scripted import ScriptedConfig, ScriptedEngine

__all__ = ["FeatureDraft", "FeatureTarget"]

_ROW_BYTES = 8


class FeatureTarget(ScriptedEngine):
    """Its feature at position p is the sum of (i + 1) * token_i up to p: another text, another feature."""

    @property
    def features(self) -> "FeatureTarget":
        return self

    def read(self, block_table: Sequence[int], start: int, end: int) -> bytes:
        return prefix_sums(self, block_table, end)[start:].tobytes()


class FeatureDraft(ScriptedEngine):
    """Refuses to run a row over a feature of another text, and counts rows that had none."""

    def __init__(self, config: ScriptedConfig) -> None:
        super().__init__(config)
        slots = config.num_blocks * config.block_size
        self._inputs = np.zeros(slots, dtype=np.int64)
        self._own = np.zeros(slots, dtype=bool)
        self.self_fed_rows = 0

    @property
    def feature_row_bytes(self) -> int:
        return _ROW_BYTES

    def write_features(self, block_table: Sequence[int], first_position: int, payload: bytes) -> None:
        rows = np.frombuffer(payload, dtype=np.int64)
        one = ForwardSlice(token_ids=[], start=0, block_table=block_table, num_logits=0)
        slots = self._slots(one, first_position, first_position + len(rows))
        self._inputs[slots], self._own[slots] = rows, False

    def forward(self, batch: ForwardBatch) -> Tensor:
        logits = super().forward(batch)
        for one in batch.slices:
            self._check(one)
        return logits

    def _check(self, one: ForwardSlice) -> None:
        end = one.start + len(one.token_ids)
        slots = self._slots(one, 0, end)
        sums = prefix_sums(self, one.block_table, end)
        for p in range(max(1, one.start), end):
            if self._own[slots[p - 1]]:
                self.self_fed_rows += 1
            elif self._inputs[slots[p - 1]] != sums[p - 1]:
                raise ValueError(f"the feature of position {p - 1} belongs to another text")
        if one.num_logits:
            self._own[slots[end - 1]] = True


def prefix_sums(engine: ScriptedEngine, block_table: Sequence[int], end: int) -> np.ndarray:
    slots = engine._slots(ForwardSlice(token_ids=[], start=0, block_table=block_table, num_logits=0), 0, end)
    return np.cumsum(engine._tokens[slots] * np.arange(1, end + 1))
