"""The decoder of Llama's shape over packed weights, without what a step of a few rows waits for.

Models of any other shape, on other devices, or shared between ranks run through transformers' own
forward, with the same weights and the same paged attention.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from outrider.engine.attention import KVPool
from outrider.engine.int4 import GROUP_SIZE, Int4Linear
from outrider.engine.lean_layers import LayerWeights, LeanLayers, Product, norm_weight, rms_norm, scripted
from outrider.engine.linear import PackedLinear
from outrider.engine.merged import GatedMLP, MergedAttention
from outrider.engine.ragged import RaggedBatch

__all__ = ["InputTaker", "LeanDecoder", "lean_decoder"]

# What differs between them is settled by their weights: biases, for one.
_DECODERS = ("LlamaModel", "MistralModel", "Qwen2Model")
_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm")


class InputTaker(Protocol):
    """Wants the input of some layers."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Their numbers, from 0, ascending."""
        ...

    def take(self, layer: int, hidden: Tensor, slots: Tensor) -> None:
        """The input of a layer: hidden [total, hidden_size] of the rows whose KV goes to `slots` [total]."""
        ...


def lean_decoder(decoder: Any) -> "LeanDecoder | None":
    """The lean forward of a transformers decoder whose linear layers are packed; None if it has another shape."""
    fits = (
        type(decoder).__name__ in _DECODERS
        and type(decoder.norm).__name__ in _NORMS
        and all(_fits(layer) for layer in decoder.layers)
    )
    return LeanDecoder(decoder) if fits else None


def _fits(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    return (
        type(layer).__name__ in _LAYERS
        and type(layer.input_layernorm).__name__ in _NORMS
        and type(layer.post_attention_layernorm).__name__ in _NORMS
        and isinstance(attention, MergedAttention)
        and isinstance(mlp, GatedMLP)
        and all(
            isinstance(linear, (PackedLinear, Int4Linear))
            for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
    )


class LeanDecoder:
    """From token ids to the last hidden states. Shares all matrices with the modules that it was made from."""

    def __init__(self, decoder: Any) -> None:
        """Of a decoder that `lean_decoder` accepts."""
        attention: MergedAttention = decoder.layers[0].self_attn
        self._table: Tensor = decoder.embed_tokens.weight
        self._rotary: nn.Module = decoder.rotary_emb
        self._norm = norm_weight(decoder.norm.weight, decoder.norm.variance_epsilon)
        layers = LeanLayers(
            [_weights(layer) for layer in decoder.layers],
            attention.heads,
            attention.kv_heads,
            attention.head_dim,
            attention.scaling,
        )
        self._run = scripted(layers)

    def __call__(self, batch: RaggedBatch, kv: KVPool, taker: InputTaker | None = None) -> Tensor:
        """Hidden states [total, hidden_size] of all rows; writes their KV, and tells `taker`."""
        hidden = embedding(batch.input_ids, self._table)
        # [1, total, head_dim] to [total, 1, head_dim]: one angle for all heads of a row.
        cos, sin = (one.squeeze(0).unsqueeze(1) for one in self._rotary(hidden, batch.position_ids.unsqueeze(0)))
        sin = _signed(sin)
        pool = [layer.storage[0] for layer in kv.layers]
        groups, output_rows = list(batch.groups), batch.output_rows
        first = 0
        if taker is not None:
            for last in taker.layers:
                hidden = self._run(hidden, cos, sin, batch.slots, pool, groups, output_rows, first, last)
                taker.take(last, hidden, batch.slots)
                first = last
        hidden = self._run(hidden, cos, sin, batch.slots, pool, groups, output_rows, first, len(pool))
        return rms_norm(hidden, self._norm)


def _weights(layer: Any) -> LayerWeights:
    def norm(module: Any) -> Any:
        return norm_weight(module.weight, module.variance_epsilon)

    attention, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        attention_norm=norm(layer.input_layernorm),
        qkv=_product(attention.qkv_proj),
        out=_product(attention.o_proj),
        mlp_norm=norm(layer.post_attention_layernorm),
        gate=_product(mlp.gate_proj),
        up=_product(mlp.up_proj),
        down=_product(mlp.down_proj),
    )


def _product(linear: PackedLinear | Int4Linear) -> Product:
    if isinstance(linear, Int4Linear):
        return Product(linear.weight, linear.scales_and_zeros, linear.bias, GROUP_SIZE)
    return Product(linear.weight, None, linear.bias, 0)


def _signed(sin: Tensor) -> Tensor:
    first, second = sin.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)
