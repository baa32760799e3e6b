"""Attention of slices that are padded into groups: the path for devices without a paged kernel.

Each group gathers its keys and values from the pool and makes one call of torch's attention. Written in the
part of Python that TorchScript takes: see `engine.lean_layers`.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["AttentionGroup", "attend_group", "attend_groups"]


class AttentionGroup(NamedTuple):
    """Slices that attend in one call: padded to `rows` queries and `context` keys each."""

    size: int
    """Number of slices."""
    rows: int
    """Query rows per slice, after padding."""
    context: int
    """Keys per slice, after padding; a multiple of the block size."""
    query_rows: Optional[Tensor]  # noqa: UP045 - TorchScript
    """Row of the batch that each padded query copies; [size * rows]. None: all rows, in order."""
    blocks: Tensor
    """KV blocks to gather; [size * context // block_size]. Padding repeats a block of the slice."""
    room: Tensor
    """For the gathered keys and values; [blocks, block_size, 2 * kv_heads, head_dim]. Each layer overwrites
    it: memory of this size, asked for anew in every layer, costs more in page faults than the gather."""
    mask: Tensor
    """Added to the scores: 0 where a query sees a key, else -inf; [size, 1, shared * rows, context]."""


def attend_group(query: Tensor, joined: Tensor, group: AttentionGroup, scaling: float) -> Tensor:
    """Attention of one group over one layer's pool.

    query [total, heads, head_dim] holds the whole batch; joined [num_blocks, block_size, 2 * kv_heads,
    head_dim] the keys and values side by side. Returns [size * rows, heads * head_dim].
    """
    heads, head_dim = query.shape[1], query.shape[2]
    kv_heads = joined.shape[2] // 2
    shared = heads // kv_heads
    torch.index_select(joined, 0, group.blocks, out=group.room)
    # [size, 2 * kv_heads, context, head_dim]
    gathered = group.room.view(group.size, group.context, 2 * kv_heads, head_dim).transpose(1, 2)
    # Query heads that share a KV head become rows of one head: keys are then never repeated.
    query_rows = group.query_rows
    rows = query if query_rows is None else query.index_select(0, query_rows)
    packed = rows.reshape(group.size, group.rows, kv_heads, shared, head_dim)
    packed = packed.permute(0, 2, 3, 1, 4).reshape(group.size, kv_heads, shared * group.rows, head_dim)
    output = scaled_dot_product_attention(
        packed, gathered[:, :kv_heads], gathered[:, kv_heads:], attn_mask=group.mask, scale=scaling
    )
    output = output.view(group.size, kv_heads, shared, group.rows, head_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(group.size * group.rows, heads * head_dim)


def attend_groups(
    query: Tensor,
    joined: Tensor,
    groups: list[AttentionGroup],
    output_rows: Optional[Tensor],  # noqa: UP045
    scaling: float,
) -> Tensor:
    """Attention of all groups of a batch, [total, heads * head_dim]: see `attend_group`.

    output_rows [total]: row of the concatenated group outputs that holds each batch row; None: in order.
    """
    outputs = [attend_group(query, joined, group, scaling) for group in groups]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if output_rows is None else output.index_select(0, output_rows)
