"""Features: what a target's layers say about a row, packed for a draft that reads them.

One feature row is bfloat16 [hidden_size of the draft], already fused from the target's three layers:
a third of what the layers themselves would take, on the wire and in memory. Rows lie in the pool of
the engine, in the slots of the same positions' KV, so that whatever KV a sequence has (shared with
others, or computed long ago) its features are there as well.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = ["FeatureSink", "FeatureSource", "HasFeatures"]


class FeatureSource(Protocol):
    """A target's stored features."""

    def read(self, block_table: Sequence[int], start: int, end: int) -> bytes:
        """Packed rows of positions start … end - 1, whose KV is valid. Waits for the device."""
        ...


@runtime_checkable
class HasFeatures(Protocol):
    """An engine that can store features."""

    @property
    def features(self) -> FeatureSource | None:
        """Where they are; None when it was built without."""
        ...


@runtime_checkable
class FeatureSink(Protocol):
    """A draft's engine that needs the target's features: see `ModelEngine` for the rest of it.

    A forward's row at position p reads the feature of position p - 1 as it was written last, or,
    where none was, what the engine's own row at p - 1 gave when its logits were asked for.
    """

    @property
    def feature_row_bytes(self) -> int:
        """Bytes of one packed row."""
        ...

    def write_features(self, block_table: Sequence[int], first_position: int, payload: bytes) -> None:
        """Store packed rows of positions first_position, …, whose blocks are in `block_table`.

        Raises `ValueError` when the payload is no whole number of rows, or the blocks do not hold them.
        """
        ...
