"""How many KV blocks fit into a byte budget."""

import torch

from outrider.core.errors import ConfigError
from outrider.engine.shape import ModelShape

__all__ = ["block_bytes", "blocks_that_fit", "largest_shard"]


def largest_shard(shape: ModelShape, tensor_parallel_size: int) -> ModelShape:
    """The largest rank's share of a whole model: heads need not divide evenly.

    Raises `ConfigError` when there are fewer KV heads than ranks.
    """
    if not 1 <= tensor_parallel_size <= shape.kv_heads:
        raise ConfigError(
            f"tensor_parallel_size: {tensor_parallel_size} ranks cannot share {shape.kv_heads} KV heads; "
            f"give 1 to {shape.kv_heads}"
        )
    kv_heads = -(-shape.kv_heads // tensor_parallel_size)
    return ModelShape(
        num_layers=shape.num_layers,
        heads=kv_heads * shape.shared_heads,
        kv_heads=kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_positions=shape.max_positions,
    )


def block_bytes(shape: ModelShape, *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one KV block takes on the rank of this shape: keys and values, all layers."""
    return 2 * shape.num_layers * block_size * shape.kv_heads * shape.head_dim * dtype.itemsize


def blocks_that_fit(shape: ModelShape, *, kv_bytes: int, block_size: int, dtype: torch.dtype) -> int:
    """KV blocks that `kv_bytes` per rank hold. Raises `ConfigError` if not even one fits."""
    one = block_bytes(shape, block_size=block_size, dtype=dtype)
    if kv_bytes < one:
        raise ConfigError(f"kv_bytes: {kv_bytes} bytes do not hold one KV block of {one} bytes")
    return kv_bytes // one
