"""From a `ForwardBatch` to the tensors that one ragged forward needs, made once for all layers.

All rows of all slices lie flattened in one row dimension, "total". Attention cannot: slices differ
in rows and context. Slices of similar context are therefore padded together into a group, which
costs one gather and one attention call per layer for a whole batch of decode rows. A prefill chunk
is cut into tiles of rows first: a tile sees no keys beyond its last row, and masks stay small.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.attention import LayerKV
from outrider.engine.base import EngineLimits, ForwardBatch, ForwardSlice
from outrider.engine.grouped_attention import AttentionGroup, attend_groups

__all__ = ["RaggedBatch", "RowLayout", "check_batch", "ragged_batch"]

# A group may hold this many times the query-key pairs that its slices need. Padding wastes
# arithmetic, a group more wastes a gather and a call per layer.
_MAX_PADDING = 2.0
# Groups are limited, so that a mask stays small beside the KV it covers.
_MAX_GROUP_PAIRS = 1 << 20
# Rows of a tile. Each tile gathers its context anew, which larger tiles do less often; smaller ones
# see fewer keys in vain.
_MAX_TILE_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """What every layer of one forward reads."""

    input_ids: Tensor
    """[total]"""
    position_ids: Tensor
    """[total]"""
    slots: Tensor
    """Where each row's KV goes: block * block_size + offset; [total]."""
    groups: tuple[AttentionGroup, ...]
    output_rows: Tensor | None
    """Row of the concatenated group outputs that holds each batch row; [total]. None: in order."""
    logit_rows: Tensor
    """Rows whose logits are wanted, in batch order; [sum of num_logits]."""

    def attend(self, query: Tensor, kv: LayerKV, scaling: float) -> Tensor:
        """Implements `AttentionBatch.attend`, for pools whose keys and values are joined."""
        return attend_groups(query, kv.storage[0], list(self.groups), self.output_rows, scaling)


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
    """Lay a checked batch out for one forward."""
    limits, device = layout.limits, layout.device
    starts = _offsets([len(one.token_ids) for one in batch.slices])
    tiles = [tile for one, at in zip(batch.slices, starts, strict=True) for tile in _tiles(one, at)]
    members = _grouped(tiles, limits.block_size)
    groups = tuple(_group(group, batch.num_rows, layout) for group in members)
    return RaggedBatch(
        input_ids=_row([token for one in batch.slices for token in one.token_ids], device),
        position_ids=_row([p for one in batch.slices for p in _positions(one)], device),
        slots=_row([s for one in batch.slices for s in _slots(one, limits.block_size)], device),
        groups=groups,
        output_rows=_output_rows(members, groups, batch.num_rows, device),
        logit_rows=_row([r for one, at in zip(batch.slices, starts, strict=True) for r in _wanted(one, at)], device),
    )


def check_batch(batch: ForwardBatch, limits: EngineLimits) -> None:
    """Raise `ValueError` when a slice does not fit the engine's limits.

    The caller then has a bug: a forward with such a slice would read or overwrite another sequence's KV.
    """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """Consecutive rows of one slice."""

    at: int
    """Row of the batch where the tile begins."""
    rows: int
    start: int
    """Position of its first row."""
    block_table: Sequence[int]

    def context(self, block_size: int) -> int:
        """Keys to gather: up to the tile's last row, in whole blocks."""
        return -(-(self.start + self.rows) // block_size) * block_size


def _tiles(one: ForwardSlice, at: int) -> list[_Tile]:
    rows = len(one.token_ids)
    return [
        _Tile(
            at=at + first,
            rows=min(_MAX_TILE_ROWS, rows - first),
            start=one.start + first,
            block_table=one.block_table,
        )
        for first in range(0, rows, _MAX_TILE_ROWS)
    ]


def _grouped(tiles: Sequence[_Tile], block_size: int) -> list[list[_Tile]]:
    """The tiles, group by group; neighbours in size go together."""
    groups: list[list[_Tile]] = []
    needed = widest = 0
    for tile in sorted(tiles, key=lambda one: (one.rows, one.context(block_size))):
        context = tile.context(block_size)
        pairs = tile.rows * context
        padded = (len(groups[-1]) + 1) * tile.rows * max(widest, context) if groups else 0
        if groups and padded <= min(_MAX_PADDING * (needed + pairs), _MAX_GROUP_PAIRS):
            groups[-1].append(tile)
            needed, widest = needed + pairs, max(widest, context)
        else:
            groups.append([tile])
            needed, widest = pairs, context
    # Batch order inside a group: equal slices then need no reordering of the queries.
    return [sorted(group, key=lambda one: one.at) for group in groups]


def _group(members: list[_Tile], num_rows: int, layout: RowLayout) -> AttentionGroup:
    block_size, device = layout.limits.block_size, layout.device
    rows = max(tile.rows for tile in members)
    context = max(tile.context(block_size) for tile in members)
    query_rows, blocks, positions = [], [], []
    for tile in members:
        padding = rows - tile.rows
        # A padded query repeats the tile's first: it sees a key, so its softmax is defined.
        query_rows += [*range(tile.at, tile.at + tile.rows), *([tile.at] * padding)]
        positions += [*range(tile.start, tile.start + tile.rows), *([tile.start] * padding)]
        used = list(tile.block_table[: tile.context(block_size) // block_size])
        blocks += [*used, *([used[0]] * (context // block_size - len(used)))]
    last_key = _row(positions, device).view(len(members), 1, rows, 1)
    hidden = torch.arange(context, device=device) > last_key
    mask = torch.zeros(hidden.shape, dtype=layout.dtype, device=device).masked_fill_(hidden, float("-inf"))
    gathered = (len(blocks), block_size, 2 * layout.kv_heads, layout.head_dim)
    return AttentionGroup(
        size=len(members),
        rows=rows,
        context=context,
        query_rows=None if query_rows == list(range(num_rows)) else _row(query_rows, device),
        blocks=_row(blocks, device),
        room=torch.empty(gathered, dtype=layout.dtype, device=device),
        mask=mask.repeat(1, 1, layout.shared_heads, 1),
    )


def _output_rows(
    members: list[list[_Tile]], groups: tuple[AttentionGroup, ...], num_rows: int, device: torch.device
) -> Tensor | None:
    rows = [0] * num_rows
    begin = 0
    for tiles, group in zip(members, groups, strict=True):
        for tile in tiles:
            rows[tile.at : tile.at + tile.rows] = range(begin, begin + tile.rows)
            begin += group.rows
    return None if rows == list(range(begin)) else _row(rows, device)


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
