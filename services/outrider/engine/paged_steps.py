"""How a step runs over a paged kernel: packed on the host, copied once, replayed or run eagerly."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.attention import AttentionBatch
from outrider.engine.base import EngineLimits, ForwardBatch
from outrider.engine.paged_batch import Fields, PackedShape, PagedBatch, PagedKernel, PagedRows, pack_step
from outrider.engine.step_graphs import Recorder, Run, bucket_of

__all__ = ["Layers", "PagedOptions", "PagedSteps"]

Layers = Callable[[Tensor, Tensor, AttentionBatch], Tensor]
"""Runs the decoder: input_ids [total], position_ids [total] and the batch to hidden states [total, hidden]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedOptions:
    """How an engine with a paged kernel runs its steps."""

    kernel: PagedKernel
    max_width: int
    """Steps whose slices have at most so many rows are packed by row."""
    row_buckets: tuple[int, ...] = ()
    """Numbers of rows that are recorded; ascending. Empty: every step runs eagerly."""
    recorder: Recorder
    record_at_start: bool = False
    """Record everything before the first step, instead of each when it is first needed."""


class PagedSteps:
    """Prepares steps and runs them. One thread calls it; every rank of a group in the same order.

    Preparing touches the host only, so that a batch can be refused before any rank hears of it.
    """

    def __init__(self, layers: Layers, limits: EngineLimits, options: PagedOptions, device: torch.device) -> None:
        """`layers` must write to a KV pool with one block more than `limits` says, for padding rows."""
        self._layers = layers
        self._limits = limits
        self._options = options
        self._device = device
        self._pages = -(-limits.max_model_len // limits.block_size)
        largest = PackedShape.by_row(rows=max(options.row_buckets, default=0), pages=self._pages)
        self._static = torch.zeros(largest.size, dtype=torch.int32, device=device)
        self._recorded: dict[int, Run] = {}

    def record_all(self) -> None:
        """Record every bucket, the largest first: the others then fit into its memory."""
        for rows in reversed(self._options.row_buckets):
            self._repeat(rows)

    def prepare(self, batch: ForwardBatch) -> Run:
        """Pack a checked batch; returns what runs it: the states of the rows that want logits."""
        narrow = max(len(one.token_ids) for one in batch.slices) <= self._options.max_width
        bucket = bucket_of(batch.num_rows, self._options.row_buckets) if narrow else None
        if bucket is not None:
            shape = PackedShape.by_row(rows=bucket, pages=self._pages)
            packed, num_logits = self._pack(batch, shape)
            return lambda: self._run_recorded(packed, shape, num_logits)
        shape = PackedShape.by_slice(batch, self._limits.block_size)
        max_rows = max(len(one.token_ids) for one in batch.slices)
        if narrow:
            shape, max_rows = PackedShape.by_row(rows=batch.num_rows, pages=shape.pages), 1
        packed, num_logits = self._pack(batch, shape)
        return lambda: self._run_eagerly(packed, shape, num_logits, max_rows)

    def _pack(self, batch: ForwardBatch, shape: PackedShape) -> tuple[Tensor, int]:
        # Pinned buffers are torch's to reuse: it waits until the copy from one is done, so a rank
        # that runs ahead of its device cannot overwrite the step before.
        packed = torch.empty(shape.size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        spare = self._limits.num_blocks
        block_size = self._limits.block_size
        return packed, pack_step(packed.numpy(), batch, shape, block_size=block_size, spare_block=spare)

    def _run_recorded(self, packed: Tensor, shape: PackedShape, num_logits: int) -> Tensor:
        repeat = self._repeat(shape.rows)
        static = self._static[: shape.size]
        static.copy_(packed, non_blocking=True)
        return repeat().index_select(0, shape.fields(static).logit_rows[:num_logits])

    def _run_eagerly(self, packed: Tensor, shape: PackedShape, num_logits: int, max_rows: int) -> Tensor:
        fields = shape.fields(packed.to(self._device, non_blocking=True))
        max_keys = shape.pages * self._limits.block_size
        hidden = self._run(fields, max_rows=max_rows, max_keys=max_keys)
        return hidden.index_select(0, fields.logit_rows[:num_logits])

    def _repeat(self, rows: int) -> Run:
        """The recorded step of so many rows; recorded now if it is new, on padding rows alone."""
        if rows not in self._recorded:
            shape = PackedShape.by_row(rows=rows, pages=self._pages)
            static = self._static[: shape.size]
            packed, _ = self._pack(ForwardBatch(slices=()), shape)
            static.copy_(packed, non_blocking=True)
            fields = shape.fields(static)
            self._recorded[rows] = self._options.recorder.record(
                lambda: self._run(fields, max_rows=1, max_keys=self._limits.max_model_len)
            )
        return self._recorded[rows]

    def _run(self, fields: Fields[Tensor], *, max_rows: int, max_keys: int) -> Tensor:
        batch = PagedBatch(
            slots=fields.slots.long(),
            kernel=self._options.kernel,
            rows=PagedRows(
                cu_seq_q=fields.cu_seq_q,
                cu_seq_k=fields.cu_seq_k,
                seqused_k=fields.seqused_k,
                block_table=fields.block_table,
                max_rows=max_rows,
                max_keys=max_keys,
            ),
        )
        return self._layers(fields.input_ids, fields.position_ids, batch)
