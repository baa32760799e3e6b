"""Replace a model's linear layers, in place, by ones that are fast for a few rows."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from outrider.engine.huge_pages import span_of, use_huge_pages
from outrider.engine.int4 import Int4Linear
from outrider.engine.linear import DenseLinear, LinearFactory, PackedLinear, can_pack
from outrider.engine.merged import GatedMLP, MergedAttention, MergedMLP, has_llama_attention, has_llama_mlp

__all__ = ["pack_model", "pack_model_int4"]


def pack_model(model: PreTrainedModel) -> None:
    """Merge the projections that Llama's shape allows, and make every linear layer anew.

    Layer by layer, and each original is dropped before the next is touched: at no time do more
    than one layer's weights lie in memory twice. The exception is a tied output head: the table
    stays for the embedding, and the head gets a packed copy, because it is the largest product of
    a small model (three times faster packed, at six rows).

    Read `ModelShape.of_model` before: afterwards the projections are gone.
    """
    factory = _full_precision(model)
    _pack(model, layers=factory, head=factory)


def pack_model_int4(model: PreTrainedModel) -> None:
    """The same, with the decoder layers in four bits.

    The output head stays in the model's type. Measured on SmolLM2-135M against float32: its
    greedy token agrees at 97 % of the positions so, and at 83 % with a four-bit head, which would
    save a tenth of a step. Raises `CompatibilityError` when a layer's sizes cannot be packed.
    """
    _pack(model, layers=Int4Linear, head=_full_precision(model))


def _full_precision(model: PreTrainedModel) -> LinearFactory:
    weight = model.get_output_embeddings().weight
    if isinstance(weight, torch.Tensor) and can_pack(weight.device, weight.dtype):
        return PackedLinear
    return DenseLinear


def _pack(model: PreTrainedModel, *, layers: LinearFactory, head: LinearFactory) -> None:
    for layer in model.get_decoder().layers:
        if has_llama_attention(layer.self_attn):
            layer.self_attn = MergedAttention(layer.self_attn, layers)
        if has_llama_mlp(layer.mlp):
            gates = layers is not DenseLinear and _is_silu(layer.mlp.act_fn)
            layer.mlp = (GatedMLP if gates else MergedMLP)(layer.mlp, layers)
        _replace_linears(layer, layers)
    output = model.get_output_embeddings()
    model.set_output_embeddings(head(output.weight, output.bias))
    packed = [module for module in model.modules() if isinstance(module, (PackedLinear, Int4Linear))]
    use_huge_pages(span_of(module.weight) for module in packed)


def _is_silu(activation: nn.Module) -> bool:
    # transformers has a class of its own for the same function.
    return isinstance(activation, (nn.SiLU, SiLUActivation))


def _replace_linears(parent: nn.Module, factory: LinearFactory) -> None:
    for name, child in list(parent.named_children()):
        if isinstance(child, nn.Linear):
            delattr(parent, name)
            setattr(parent, name, factory(child.weight, child.bias))
        else:
            _replace_linears(child, factory)
