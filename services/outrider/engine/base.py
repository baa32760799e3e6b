"""The model engine as the draft and target loops see it: ragged batches in, logits out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    Logits: TypeAlias = Tensor
    """For the loops above, which hand logits on without looking inside."""

__all__ = ["EngineLimits", "ForwardBatch", "ForwardSlice", "ModelEngine", "QueueingEngine", "wait_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine can hold and compute. Constant over its life."""

    vocab_size: int
    """Columns of the logits; ids at or above the tokenizer's size are padding."""
    max_model_len: int
    """Positions the model supports, prompt and output together."""
    num_blocks: int
    """KV blocks in the pool; block ids are 0 … num_blocks - 1."""
    block_size: int
    """Token positions per KV block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSlice:
    """The rows of one sequence in one step: a prefill chunk, a plain row, or 1 + k verify rows.

    The forward writes KV for positions start … start + len(token_ids) - 1 into the blocks of
    `block_table` (position p lives in block_table[p // block_size] at p % block_size) and each row
    attends to every position up to its own. KV for positions below `start` must have been written
    by earlier forwards; whatever stood at `start` and after is overwritten, which is all that a
    rollback takes.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    num_logits: int
    """Logits are returned for the last `num_logits` rows; 0 for a prefill chunk in the middle."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_logits <= len(self.token_ids):
            raise ValueError(f"num_logits {self.num_logits} of {len(self.token_ids)} rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step over all running sequences. Holds references; valid until the forward returns."""

    slices: tuple[ForwardSlice, ...]

    @property
    def num_rows(self) -> int:
        """Token rows of the forward."""
        return sum(len(one.token_ids) for one in self.slices)


class ModelEngine(Protocol):
    """A model with its own KV pool. Not thread-safe: one thread calls it."""

    @property
    def limits(self) -> EngineLimits:
        """What this engine can hold."""
        ...

    def forward(self, batch: ForwardBatch) -> "Tensor":
        """Run one ragged forward pass and write its KV.

        Returns logits [sum of num_logits, vocab_size], float32 (float64 from the scripted
        engine), slice by slice in batch order. Raises `EngineUnavailable` naming the rank when a
        tensor-parallel peer is gone; the engine is then unusable and must be rebuilt.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the KV of whole blocks, (source, destination) in order, before the next forward.

        Forks of a draft's sequences need it. Raises `EngineUnavailable` as `forward` does.
        """
        ...

    def close(self) -> None:
        """Release the model and, for a tensor-parallel engine, end the other ranks' loops."""
        ...


@runtime_checkable
class QueueingEngine(Protocol):
    """A `ModelEngine` whose `forward` returns when the device has the work, not when it is done with it.

    What the host does between `forward` and `wait` costs nothing: loops put there whatever the next
    forward does not need. Forwards and copies take effect in the order of their calls.
    """

    def wait(self) -> None:
        """Return when the logits of the last forward may be read; at once when they already may."""
        ...


def wait_of(engine: ModelEngine) -> Callable[[], None] | None:
    """The engine's `wait`; None for one that is done when `forward` returns."""
    return engine.wait if isinstance(engine, QueueingEngine) else None
