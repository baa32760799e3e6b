"""One step as one packed array of integers, for devices with a paged attention kernel.

The array goes to the device in a single copy, from pinned memory; everything that the layers read is
a view into it. Two layouts of the same fields:

    by row     every row is a sequence of its own, with its slice's block table. The kernel then works
               on single queries only, which it can split along the keys: a verify row costs what a
               plain row costs, rows of different widths need no padding against each other, and one
               CUDA graph serves every mix with the same number of rows.
    by slice   a slice is a sequence with several rows: prefill chunks, and what comes along with them.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.attention import LayerKV
from outrider.engine.base import ForwardBatch

__all__ = ["Fields", "PackedShape", "PagedBatch", "PagedKernel", "PagedRows", "pack_step"]

_Array = TypeVar("_Array", NDArray[np.int32], Tensor)


class Fields(NamedTuple, Generic[_Array]):
    """Views into a packed array, on the host or on the device; all int32."""

    input_ids: _Array
    """[rows]"""
    position_ids: _Array
    """[rows]"""
    slots: _Array
    """Where each row's KV goes: block * block_size + offset; [rows]."""
    logit_rows: _Array
    """Rows whose logits are wanted come first; [rows]."""
    cu_seq_q: _Array
    """First row of each sequence, and the number of rows; [sequences + 1]."""
    cu_seq_k: _Array
    """First key of each sequence, if their keys lay one after the other; [sequences + 1]."""
    seqused_k: _Array
    """Keys of each sequence; [sequences]."""
    block_table: _Array
    """[sequences, pages]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShape:
    """Sizes of one packed step."""

    rows: int
    """Token rows, padding included."""
    sequences: int
    """What the kernel takes as sequences: as many as rows, or as slices."""
    pages: int
    """Blocks in a row of the block table."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Integers of each field, in order."""
        starts = self.sequences + 1
        return (self.rows,) * 4 + (starts, starts, self.sequences, self.sequences * self.pages)

    @property
    def size(self) -> int:
        """Integers in all."""
        return sum(self.sizes)

    def fields(self, packed: _Array) -> Fields[_Array]:
        """The fields of a packed array [size]."""
        ends = accumulate(self.sizes)
        views = [packed[end - size : end] for size, end in zip(self.sizes, ends, strict=True)]
        return Fields(
            input_ids=views[0],
            position_ids=views[1],
            slots=views[2],
            logit_rows=views[3],
            cu_seq_q=views[4],
            cu_seq_k=views[5],
            seqused_k=views[6],
            block_table=views[7].reshape(self.sequences, self.pages),
        )

    @classmethod
    def by_row(cls, *, rows: int, pages: int) -> "PackedShape":
        """Every row a sequence of its own."""
        return cls(rows=rows, sequences=rows, pages=pages)

    @classmethod
    def by_slice(cls, batch: ForwardBatch, block_size: int) -> "PackedShape":
        """Every slice a sequence, without padding but of the block table."""
        ends = [one.start + len(one.token_ids) for one in batch.slices]
        return cls(rows=batch.num_rows, sequences=len(ends), pages=-(-max(ends) // block_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """What a paged kernel needs to know of the rows; the tensors as in `Fields`."""

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    seqused_k: Tensor
    block_table: Tensor
    max_rows: int
    """Rows of the longest sequence."""
    max_keys: int
    """No sequence has more keys; inside a CUDA graph, what any later step may have."""


class PagedKernel(Protocol):
    """Attention over one layer's pool."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float) -> Tensor:
        """query [total, heads, head_dim], keys and values [num_blocks, block_size, kv_heads, head_dim].

        The last row of a sequence sees all its keys, the row before one less, and so on. Returns
        [total, heads, head_dim].
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Implements `attention.AttentionBatch` over a paged kernel."""

    slots: Tensor
    """[total], int64"""
    rows: PagedRows
    kernel: PagedKernel

    def attend(self, query: Tensor, kv: LayerKV, scaling: float) -> Tensor:
        """See `AttentionBatch.attend`."""
        return self.kernel(query, kv.keys, kv.values, self.rows, scaling).flatten(1)


def pack_step(
    packed: NDArray[np.int32], batch: ForwardBatch, shape: PackedShape, *, block_size: int, spare_block: int
) -> int:
    """Write a checked batch into `packed` [shape.size]; returns how many rows want logits.

    Padding rows are token 0 at position 0 of `spare_block`, which belongs to no sequence, and see
    that one key: they cost time but touch nobody's KV, and are never undefined.
    """
    fields = shape.fields(packed)
    _fill_padding(fields, block_size, spare_block)
    by_row = shape.sequences == shape.rows
    row = sequence = num_logits = 0
    ends = []
    for one in batch.slices:
        count, end = len(one.token_ids), one.start + len(one.token_ids)
        positions = np.arange(one.start, end, dtype=np.int32)
        blocks = np.asarray(one.block_table[: -(-end // block_size)], dtype=np.int32)
        rows = slice(row, row + count)
        fields.input_ids[rows] = one.token_ids
        fields.position_ids[rows] = positions
        fields.slots[rows] = blocks[positions // block_size] * block_size + positions % block_size
        wanted = slice(num_logits, num_logits + one.num_logits)
        fields.logit_rows[wanted] = np.arange(row + count - one.num_logits, row + count, dtype=np.int32)
        taken = slice(sequence, sequence + (count if by_row else 1))
        fields.block_table[taken, : len(blocks)] = blocks
        fields.seqused_k[taken] = positions + 1 if by_row else end
        row, sequence, num_logits = row + count, taken.stop, wanted.stop
        ends.append(row)
    if not by_row:
        fields.cu_seq_q[1:] = ends
    np.cumsum(fields.seqused_k, out=fields.cu_seq_k[1:])
    return num_logits


def _fill_padding(fields: Fields[NDArray[np.int32]], block_size: int, spare_block: int) -> None:
    for zeroed in (fields.input_ids, fields.position_ids, fields.logit_rows, fields.cu_seq_k):
        zeroed.fill(0)
    fields.slots.fill(spare_block * block_size)
    fields.cu_seq_q[:] = np.arange(len(fields.cu_seq_q), dtype=np.int32)
    fields.seqused_k.fill(1)
    fields.block_table.fill(spare_block)
