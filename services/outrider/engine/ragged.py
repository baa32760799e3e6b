"""From a `ForwardBatch` to the tensors that one ragged forward needs, made once for all layers.

All rows of all slices lie flattened in one row dimension, "total". Attention cannot: slices differ
in rows and context. Slices of similar context are therefore padded together into a group, which
costs one gather and one attention call per layer for a whole batch of decode rows; a long prefill
chunk makes a group of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.base import EngineLimits, ForwardBatch, ForwardSlice

__all__ = ["AttentionGroup", "RaggedBatch", "RowLayout", "ragged_batch"]

# A group may hold this many times the query-key pairs that its slices need. Padding wastes
# arithmetic, a group more wastes a call per layer; measured on decode batches, 2 is near the best.
_MAX_PADDING = 2.0
# Groups are limited, so that a mask stays small beside the KV it covers.
_MAX_GROUP_PAIRS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Slices that attend in one call: padded to `rows` queries and `context` keys each."""

    size: int
    """Number of slices."""
    rows: int
    """Query rows per slice, after padding."""
    context: int
    """Keys per slice, after padding; a multiple of the block size."""
    query_rows: Tensor | None
    """Row of the batch that each padded query copies; [size * rows]. None: all rows, in order."""
    blocks: Tensor
    """KV blocks to gather; [size * context // block_size]. Padding repeats a block of the slice."""
    keys: Tensor
    """Room for the gathered keys; [blocks, block_size, kv_heads, head_dim]. Each layer overwrites it:
    memory of this size, asked for anew in every layer, costs more in page faults than the gather."""
    values: Tensor
    """Room for the gathered values; the same shape."""
    mask: Tensor
    """Added to the scores: 0 where a query sees a key, else -inf; [size, 1, shared * rows, context]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """What every layer of one forward reads."""

    input_ids: Tensor
    """[1, total]"""
    position_ids: Tensor
    """[1, total]"""
    slots: Tensor
    """Where each row's KV goes: block * block_size + offset; [total]."""
    groups: tuple[AttentionGroup, ...]
    output_rows: Tensor | None
    """Row of the concatenated group outputs that holds each batch row; [total]. None: in order."""
    logit_rows: Tensor
    """Rows whose logits are wanted, in batch order; [sum of num_logits]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """What the layout of a batch depends on, besides the batch."""

    limits: EngineLimits
    """Bounds that every slice is checked against, and the block size."""
    shared_heads: int
    """Query heads per KV head; they become rows of one head."""
    kv_heads: int
    """KV heads of this rank."""
    head_dim: int
    """Channels per head."""
    dtype: torch.dtype
    """Type of queries, keys and values."""
    device: torch.device
    """Where the tensors are made."""


def ragged_batch(batch: ForwardBatch, layout: RowLayout) -> RaggedBatch:
    """Lay `batch` out for one forward.

    Raises `ValueError` when a slice does not fit the engine's limits: the caller has a bug, and
    a forward with such a slice would read or overwrite another sequence's KV.
    """
    limits, device = layout.limits, layout.device
    _check(batch, limits)
    starts = _offsets([len(one.token_ids) for one in batch.slices])
    order = _grouped(batch.slices, limits.block_size)
    groups = tuple(_group([(batch.slices[i], starts[i]) for i in members], batch.num_rows, layout) for members in order)
    return RaggedBatch(
        input_ids=_row([token for one in batch.slices for token in one.token_ids], device).unsqueeze(0),
        position_ids=_row([p for one in batch.slices for p in _positions(one)], device).unsqueeze(0),
        slots=_row([s for one in batch.slices for s in _slots(one, limits.block_size)], device),
        groups=groups,
        output_rows=_output_rows(batch, order, groups, device),
        logit_rows=_row([r for one, at in zip(batch.slices, starts, strict=True) for r in _wanted(one, at)], device),
    )


def _check(batch: ForwardBatch, limits: EngineLimits) -> None:
    if batch.num_rows == 0:
        raise ValueError("a forward needs at least one row")
    for index, one in enumerate(batch.slices):
        end = one.start + len(one.token_ids)
        if not one.token_ids:
            raise ValueError(f"slice {index} has no rows")
        if one.start < 0 or end > limits.max_model_len:
            raise ValueError(f"slice {index}: positions {one.start}..{end - 1} outside 0..{limits.max_model_len - 1}")
        if len(one.block_table) * limits.block_size < end:
            raise ValueError(f"slice {index}: {len(one.block_table)} blocks do not hold {end} positions")
        if min(one.block_table) < 0 or max(one.block_table) >= limits.num_blocks:
            raise ValueError(f"slice {index}: block id outside 0..{limits.num_blocks - 1}")
        if min(one.token_ids) < 0 or max(one.token_ids) >= limits.vocab_size:
            raise ValueError(f"slice {index}: token id outside 0..{limits.vocab_size - 1}")


def _grouped(slices: Sequence[ForwardSlice], block_size: int) -> list[list[int]]:
    """Indices of the slices, group by group; neighbours in size go together."""

    def shape(index: int) -> tuple[int, int]:
        one = slices[index]
        return len(one.token_ids), _padded_context(one, block_size)

    groups: list[list[int]] = []
    pairs = 0
    for index in sorted(range(len(slices)), key=shape):
        rows, context = shape(index)
        if groups:
            members = groups[-1]
            widest = max(context, *(shape(member)[1] for member in members))
            padded = (len(members) + 1) * rows * widest
            if padded <= min(_MAX_PADDING * (pairs + rows * context), _MAX_GROUP_PAIRS):
                members.append(index)
                pairs += rows * context
                continue
        groups.append([index])
        pairs = rows * context
    # Batch order inside a group: equal slices then need no reordering of the queries.
    return [sorted(members) for members in groups]


def _group(members: list[tuple[ForwardSlice, int]], num_rows: int, layout: RowLayout) -> AttentionGroup:
    block_size, device = layout.limits.block_size, layout.device
    rows = max(len(one.token_ids) for one, _ in members)
    context = max(_padded_context(one, block_size) for one, _ in members)
    query_rows, blocks, positions = [], [], []
    for one, at in members:
        padding = rows - len(one.token_ids)
        # A padded query repeats the slice's first: it sees a key, so its softmax is defined.
        query_rows += [*range(at, at + len(one.token_ids)), *([at] * padding)]
        positions += [*_positions(one), *([one.start] * padding)]
        used = _padded_context(one, block_size) // block_size
        table = list(one.block_table[:used])
        blocks += [*table, *([table[0]] * (context // block_size - used))]
    last_key = _row(positions, device).view(len(members), 1, rows, 1)
    hidden = torch.arange(context, device=device) > last_key
    mask = torch.zeros(hidden.shape, dtype=layout.dtype, device=device).masked_fill_(hidden, float("-inf"))
    gathered = (len(blocks), block_size, layout.kv_heads, layout.head_dim)
    return AttentionGroup(
        size=len(members),
        rows=rows,
        context=context,
        query_rows=None if query_rows == list(range(num_rows)) else _row(query_rows, device),
        blocks=_row(blocks, device),
        keys=torch.empty(gathered, dtype=layout.dtype, device=device),
        values=torch.empty(gathered, dtype=layout.dtype, device=device),
        mask=mask.repeat(1, 1, layout.shared_heads, 1),
    )


def _output_rows(
    batch: ForwardBatch, order: list[list[int]], groups: tuple[AttentionGroup, ...], device: torch.device
) -> Tensor | None:
    begin = [0] * len(batch.slices)
    at = 0
    for members, group in zip(order, groups, strict=True):
        for index in members:
            begin[index] = at
            at += group.rows
    rows = [begin[i] + r for i, one in enumerate(batch.slices) for r in range(len(one.token_ids))]
    return None if rows == list(range(at)) else _row(rows, device)


def _padded_context(one: ForwardSlice, block_size: int) -> int:
    return -(-(one.start + len(one.token_ids)) // block_size) * block_size


def _positions(one: ForwardSlice) -> range:
    return range(one.start, one.start + len(one.token_ids))


def _slots(one: ForwardSlice, block_size: int) -> list[int]:
    return [one.block_table[p // block_size] * block_size + p % block_size for p in _positions(one)]


def _wanted(one: ForwardSlice, at: int) -> range:
    end = at + len(one.token_ids)
    return range(end - one.num_logits, end)


def _offsets(lengths: Sequence[int]) -> list[int]:
    offsets, at = [], 0
    for length in lengths:
        offsets.append(at)
        at += length
    return offsets


def _row(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=device)
