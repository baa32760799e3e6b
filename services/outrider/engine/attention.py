"""Paged attention of our own, beneath transformers' modules.

transformers' own paged cache takes one token per sequence and step and has no hook for verify
rows. Its modules do call a registered attention function with whatever keyword arguments the model
was called with: so the ragged batch and the KV pool travel as `ragged=` and `kv=`, and the modules
run with `use_cache=False`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from outrider.decoding.transfer import device_tensor

__all__ = ["IMPLEMENTATION", "AttentionBatch", "KVPool", "LayerKV", "paged_attention", "register_attention"]

IMPLEMENTATION = "outrider_paged"
"""Name under which the functions are registered; a model's `attn_implementation`."""


class AttentionBatch(Protocol):
    """The rows of one forward, as the layers see them."""

    @property
    def slots(self) -> Tensor:
        """Where each row's KV goes: block * block_size + offset; [total], int64."""
        ...

    def attend(self, query: Tensor, kv: "LayerKV", scaling: float) -> Tensor:
        """Let every row attend to its sequence, up to itself.

        query [total, heads, head_dim]. Returns [total, heads * head_dim].
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """Keys and values of one layer, each [num_blocks, block_size, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor
    joined: Tensor | None
    """[num_blocks, block_size, 2 * kv_heads, head_dim], whose halves `keys` and `values` then are; None
    where they lie apart."""

    @classmethod
    def allocate(
        cls, shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device, joined: bool
    ) -> "LayerKV":
        """Of `shape`, zeroed: a padded key that was never written must not be NaN."""
        if not joined:
            keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            return cls(keys=keys, values=values, joined=None)
        num_blocks, block_size, kv_heads, head_dim = shape
        both = torch.zeros((num_blocks, block_size, 2 * kv_heads, head_dim), dtype=dtype, device=device)
        return cls(keys=both[:, :, :kv_heads], values=both[:, :, kv_heads:], joined=both)

    @property
    def storage(self) -> tuple[Tensor, ...]:
        """The tensors that own the memory; their first dimension is the block."""
        return (self.keys, self.values) if self.joined is None else (self.joined,)

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value, both [total, kv_heads, head_dim], at `slots` [total]."""
        self.keys.flatten(0, 1).index_copy_(0, slots, key)
        self.values.flatten(0, 1).index_copy_(0, slots, value)


@dataclass(frozen=True, slots=True)
class KVPool:
    """Keys and values of every layer."""

    layers: tuple[LayerKV, ...]

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        joined: bool,
    ) -> "KVPool":
        """`joined` keeps keys and values side by side, which halves the calls that write and gather
        them; a paged kernel wants them apart."""
        shape = (num_blocks, block_size, kv_heads, head_dim)
        return cls(tuple(LayerKV.allocate(shape, dtype=dtype, device=device, joined=joined) for _ in range(num_layers)))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks of every layer, (source, destination), as if one after the other."""
        origins: dict[int, int] = {}
        for source, destination in pairs:
            origins[destination] = origins.get(source, source)
        device = self.layers[0].keys.device
        sources = device_tensor(list(origins.values()), dtype=torch.long, device=device)
        destinations = device_tensor(list(origins), dtype=torch.long, device=device)
        for tensor in (tensor for layer in self.layers for tensor in layer.storage):
            tensor.index_copy_(0, destinations, tensor.index_select(0, sources))


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, ragged: AttentionBatch, kv: LayerKV
) -> Tensor:
    """Write the rows' KV, then let every row attend to its sequence up to itself.

    query [total, heads, head_dim], key and value [total, kv_heads, head_dim], rotated. Returns
    [total, heads * head_dim].
    """
    kv.write(ragged.slots, key, value)
    return ragged.attend(query, kv, scaling)


def register_attention() -> None:
    """Make `IMPLEMENTATION` known to transformers. Repeating it changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, _from_transformers)
    # Without a mask function of the same name transformers would build none for us and warn;
    # with it, no dense [total, total] mask is ever made.
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


def _from_transformers(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    ragged: AttentionBatch,
    kv: KVPool,
    **_: Any,
) -> tuple[Tensor, None]:
    # [1, heads, total, head_dim] here; [1, total, heads, head_dim] is what the module expects back.
    rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    output = paged_attention(*rows, scaling=scaling, ragged=ragged, kv=kv.layers[module.layer_idx])
    return output.view(1, *rows[0].shape), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None
