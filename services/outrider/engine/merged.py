"""Llama's attention and MLP with one matrix product where transformers' modules make two or three."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.engine.attention import AttentionBatch, KVPool, paged_attention
from outrider.engine.linear import LinearFactory

__all__ = ["GatedMLP", "MergedAttention", "MergedMLP", "has_llama_attention", "has_llama_mlp"]


def has_llama_attention(attention: nn.Module) -> bool:
    """Whether a module is attention of Llama's shape: four projections and nothing between them."""
    children = {name for name, _ in attention.named_children()}
    return children == {"q_proj", "k_proj", "v_proj", "o_proj"}


def has_llama_mlp(mlp: nn.Module) -> bool:
    """Whether a module is a gated MLP of Llama's shape."""
    children = {name for name, _ in mlp.named_children()}
    return children == {"gate_proj", "up_proj", "down_proj", "act_fn"}


class MergedAttention(nn.Module):
    """Paged self-attention with queries, keys and values from one product.

    Takes the place of a transformers attention module, with the calling convention of its decoder
    layer; the paged KV arrives as keyword arguments of the forward.
    """

    def __init__(self, attention: Any, factory: LinearFactory) -> None:
        """Merge the projections of `attention`, which loses them: weights never lie here twice."""
        super().__init__()
        self.layer_idx: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self.head_dim: int = attention.head_dim
        self.heads: int = attention.q_proj.weight.shape[0] // self.head_dim
        self.kv_heads: int = attention.k_proj.weight.shape[0] // self.head_dim
        self.o_proj: nn.Module = attention.o_proj
        self.qkv_proj = _merge(attention, ("q_proj", "k_proj", "v_proj"), factory)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        ragged: AttentionBatch,
        kv: KVPool,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [1, total, hidden_size] to the same shape."""
        total = hidden_states.shape[1]
        qkv = self.qkv_proj(hidden_states.squeeze(0)).view(total, -1, self.head_dim)
        value = qkv[:, self.heads + self.kv_heads :]
        rotated = _rotate(qkv[:, : self.heads + self.kv_heads], *position_embeddings)
        output = paged_attention(
            rotated[:, : self.heads],
            rotated[:, self.heads :],
            value,
            scaling=self.scaling,
            ragged=ragged,
            kv=kv.layers[self.layer_idx],
        )
        return self.o_proj(output.unsqueeze(0)), None


class MergedMLP(nn.Module):
    """A gated MLP with gate and up from one product."""

    def __init__(self, mlp: Any, factory: LinearFactory) -> None:
        """Merge the projections of `mlp`, which loses them."""
        super().__init__()
        self.act_fn: nn.Module = mlp.act_fn
        self.down_proj: nn.Module = mlp.down_proj
        self.gate_up_proj = _merge(mlp, ("gate_proj", "up_proj"), factory)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., hidden_size] to the same shape."""
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        output: Tensor = self.down_proj(self.act_fn(gate) * up)
        return output


class GatedMLP(nn.Module):
    """A gated MLP with SiLU whose two products stay apart.

    oneDNN then gates inside the products, which is faster than one product for both: see `lean_layers`.
    """

    def __init__(self, mlp: Any, factory: LinearFactory) -> None:
        """Take over the projections of `mlp`, which loses them one by one."""
        super().__init__()
        self.down_proj: nn.Module = mlp.down_proj
        self.gate_proj = _merge(mlp, ("gate_proj",), factory)
        self.up_proj = _merge(mlp, ("up_proj",), factory)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., hidden_size] to the same shape."""
        output: Tensor = self.down_proj(silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
        return output


def _merge(parent: nn.Module, names: tuple[str, ...], factory: LinearFactory) -> nn.Module:
    parts = [getattr(parent, name) for name in names]
    weight = torch.cat([part.weight.detach() for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
    for name in names:
        delattr(parent, name)
    return factory(weight, bias)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Rotary embedding of queries and keys at once; [total, heads, head_dim], cos and sin [1, total, head_dim].
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return heads * cos.squeeze(0).unsqueeze(1) + turned * sin.squeeze(0).unsqueeze(1)
