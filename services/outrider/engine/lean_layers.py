"""Decoder layers of Llama's shape as one TorchScript program: a step of a few rows in one call.

A layer is two dozen small operations around five matrix products. Called one by one from Python they take
as long as the products of a small model, and hold the interpreter all the while; as a program they take
half of that, without the interpreter, so that the network's thread runs meanwhile. TorchScript needs no
compiler and is ready in milliseconds. Where torch no longer has it, the same module runs as it is.

Everything here is written in the part of Python that TorchScript takes: `Optional`, no keyword-only
arguments, no calls to what is not scripted.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Optional, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.engine.grouped_attention import AttentionGroup, attend_groups

__all__ = ["LayerWeights", "LeanLayers", "NormWeight", "Product", "RunLayers", "norm_weight", "rms_norm", "scripted"]


class Product(NamedTuple):
    """A linear layer over packed weights, of oneDNN or in four bits."""

    weight: Tensor
    scales: Optional[Tensor]  # noqa: UP045 - TorchScript
    """Scales and zeros of four-bit weights; None: `weight` is oneDNN's."""
    bias: Optional[Tensor]  # noqa: UP045
    group_size: int
    """Weights that share a scale."""


class NormWeight(NamedTuple):
    """A root-mean-square norm, with the number of channels and eps drawn out of the root.

    x / sqrt(mean(x²) + eps) * weight = x / hypot(|x|, sqrt(n eps)) * (weight sqrt(n)), which takes half
    the passes (Zhang and Sennrich, arXiv 1910.07467, has the formula).
    """

    weight: Tensor
    """weight * sqrt(n), [n], float32"""
    floor: Tensor
    """sqrt(n eps), a scalar, float32"""


class LayerWeights(NamedTuple):
    """What one layer multiplies with."""

    attention_norm: NormWeight
    qkv: Product
    """Queries, keys and values, one after the other."""
    out: Product
    mlp_norm: NormWeight
    gate: Product
    up: Product
    down: Product


def norm_weight(weight: Tensor, eps: float) -> NormWeight:
    """Of the norm's weight [n] as its module holds it."""
    channels = weight.numel()
    floor = torch.tensor(math.sqrt(channels * eps), device=weight.device)
    return NormWeight(weight.detach().float() * math.sqrt(channels), floor)


def rms_norm(rows: Tensor, norm: NormWeight) -> Tensor:
    """Norm of rows [total, n], computed in float32; the type of the rows."""
    wide = rows.float()
    length = torch.linalg.vector_norm(wide, 2.0, [-1], True).hypot_(norm.floor)
    return torch.div(wide, length).mul_(norm.weight).to(rows.dtype)


def _multiply(rows: Tensor, product: Product, attr: str) -> Tensor:
    """[total, in] to [total, out]; `attr` is "none" or "swish" (SiLU)."""
    scales = product.scales
    if scales is None:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, product.weight, product.bias, attr, [], "")
        return output
    output = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, product.weight, product.group_size, scales)
    bias = product.bias
    if bias is not None:
        output = output + bias
    return silu(output) if attr == "swish" else output


def _multiply_with(rows: Tensor, other: Tensor, product: Product, attr: str) -> Tensor:
    """The product and `other` [total, out], by "add" or "mul": oneDNN does it before it writes."""
    if product.scales is None:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, other, product.weight, product.bias, attr)
        return output
    output = _multiply(rows, product, "none")
    return output.mul_(other) if attr == "mul" else output.add_(other)


class LeanLayers(nn.Module):
    """Decoder layers in a row."""

    layers: list[LayerWeights]

    def __init__(self, layers: list[LayerWeights], heads: int, kv_heads: int, head_dim: int, scaling: float) -> None:
        super().__init__()
        self.layers = layers
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.scaling = scaling

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        pool: list[Tensor],
        groups: list[AttentionGroup],
        output_rows: Optional[Tensor],  # noqa: UP045
        first: int,
        last: int,
    ) -> Tensor:
        """Layers `first` to `last` - 1 on hidden states [total, hidden_size]; writes the rows' KV.

        cos and sin [total, 1, head_dim], the first half of sin negated; slots [total]; pool: per layer
        [num_blocks, block_size, 2 * kv_heads, head_dim]; groups and output_rows as in `RaggedBatch`.
        """
        turned = self.heads + self.kv_heads
        for index in range(first, last):
            layer = self.layers[index]
            normed = rms_norm(hidden, layer.attention_norm)
            qkv = _multiply(normed, layer.qkv, "none").view(-1, turned + self.kv_heads, self.head_dim)
            rotated = qkv[:, :turned]
            # In place: keys and values then lie side by side, as the pool wants them. Rotating (a, b)
            # takes (-b, a): the sign is in the angles.
            torch.addcmul(rotated * cos, rotated.roll(self.head_dim // 2, -1), sin, out=rotated)
            pool[index].flatten(0, 1).index_copy_(0, slots, qkv[:, self.heads :])
            attended = attend_groups(qkv[:, : self.heads], pool[index], groups, output_rows, self.scaling)
            hidden = _multiply_with(attended, hidden, layer.out, "add")
            normed = rms_norm(hidden, layer.mlp_norm)
            gated = _multiply_with(normed, _multiply(normed, layer.gate, "swish"), layer.up, "mul")
            hidden = _multiply_with(gated, hidden, layer.down, "add")
        return hidden


RunLayers = Callable[
    [Tensor, Tensor, Tensor, Tensor, list[Tensor], list[AttentionGroup], Optional[Tensor], int, int],  # noqa: UP045
    Tensor,
]
"""`LeanLayers.forward`."""


def scripted(layers: LeanLayers) -> RunLayers:
    """The layers as a program; the module itself where this torch or Python has no TorchScript."""
    script = getattr(torch.jit, "script", None)
    if script is None:
        return layers
    with warnings.catch_warnings():
        # Its successors compile C++ at run time.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        return cast("RunLayers", cast("Any", script)(layers))
