"""Attention of slices that are padded into groups: the path for devices without a paged kernel.

Each group gathers its keys and values from the pool and makes one call of torch's attention.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["AttentionGroup", "attend_group"]


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


def attend_group(query: Tensor, keys: Tensor, values: Tensor, group: AttentionGroup, scaling: float) -> Tensor:
    """Attention of one group over one layer's pool.

    query [total, heads, head_dim] holds the whole batch; keys and values [num_blocks, block_size,
    kv_heads, head_dim]. Returns [size * rows, heads * head_dim].
    """
    _, heads, head_dim = query.shape
    kv_heads = keys.shape[2]
    shared = heads // kv_heads
    key = _gather(keys, group, group.keys)
    value = _gather(values, group, group.values)
    # Query heads that share a KV head become rows of one head: keys are then never repeated.
    rows = query if group.query_rows is None else query.index_select(0, group.query_rows)
    packed = rows.reshape(group.size, group.rows, kv_heads, shared, head_dim)
    packed = packed.permute(0, 2, 3, 1, 4).reshape(group.size, kv_heads, shared * group.rows, head_dim)
    output = scaled_dot_product_attention(packed, key, value, attn_mask=group.mask, scale=scaling)
    output = output.view(group.size, kv_heads, shared, group.rows, head_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(group.size * group.rows, heads * head_dim)


def _gather(pool: Tensor, group: AttentionGroup, room: Tensor) -> Tensor:
    """The group's keys or values from one layer's pool; [size, kv_heads, context, head_dim]."""
    torch.index_select(pool, 0, group.blocks, out=room)
    return room.view(group.size, group.context, *pool.shape[2:]).transpose(1, 2)
