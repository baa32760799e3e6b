"""Packed, merged and quantised layers compute what the plain ones do, and hold weights once."""

from typing import Any

import pytest
import torch
from tests.unit.engine.tiny_models import CONFIGS, plain_logits, random_model, random_tokens
from torch import nn

from outrider.core.errors import CompatibilityError
from outrider.engine.attention import IMPLEMENTATION, KVPool, register_attention
from outrider.engine.base import EngineLimits, ForwardBatch, ForwardSlice
from outrider.engine.int4 import GROUP_SIZE, Int4Linear, quantize
from outrider.engine.lean_decoder import lean_decoder
from outrider.engine.linear import DenseLinear, PackedLinear, can_pack
from outrider.engine.merged import GatedMLP, MergedAttention, MergedMLP
from outrider.engine.packing import pack_model, pack_model_int4
from outrider.engine.ragged import RowLayout, ragged_batch
from outrider.engine.shape import ModelShape
from outrider.engine.torch_engine import TorchEngine

CPU = torch.device("cpu")
LIMITS = EngineLimits(vocab_size=128, max_model_len=64, num_blocks=8, block_size=8)


def paged_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    register_attention()
    model = random_model(CONFIGS[name], dtype=dtype)
    model.set_attn_implementation(IMPLEMENTATION)
    return model


def all_logits(model: Any, shape: ModelShape, tokens: list[int]) -> torch.Tensor:
    engine = TorchEngine(model, shape, LIMITS)
    rows = len(tokens)
    one = ForwardSlice(token_ids=tokens, start=0, block_table=[3, 1, 5], num_logits=rows)
    return engine.forward(ForwardBatch(slices=(one,)))


def restored(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The weights that four-bit levels stand for; [out, in]."""
    grouped = levels.unflatten(1, (-1, GROUP_SIZE)) - 8
    weight: torch.Tensor = (grouped * scales.float()[..., None] + zeros.float()[..., None]).flatten(1)
    return weight


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_model_equals_the_plain_one(name: str) -> None:
    tokens = random_tokens(21)
    model = paged_model(name)
    shape = ModelShape.of_model(model)

    pack_model(model)

    expected = plain_logits(random_model(CONFIGS[name]), tokens)
    torch.testing.assert_close(all_logits(model, shape, tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "llama-biased", "mistral", "qwen2"])
def test_the_llama_shape_is_merged(name: str) -> None:
    model = paged_model(name)
    pack_model(model)
    for layer in model.get_decoder().layers:
        assert isinstance(layer.self_attn, MergedAttention)
        assert isinstance(layer.mlp, GatedMLP)


@pytest.mark.parametrize("name", ["llama", "llama-biased", "mistral", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_llama_shape_runs_lean(name: str, dtype: torch.dtype) -> None:
    model = paged_model(name, dtype)
    assert lean_decoder(model.get_decoder()) is None, "nothing is packed yet"
    pack_model(model)
    assert lean_decoder(model.get_decoder()) is not None


@pytest.mark.parametrize("name", ["qwen3", "llama-gelu"])
def test_other_shapes_run_through_transformers(name: str) -> None:
    model = paged_model(name)
    pack_model(model)
    assert lean_decoder(model.get_decoder()) is None


def test_layers_that_need_a_sum_between_ranks_run_through_transformers() -> None:
    model = paged_model("llama")
    pack_model(model)
    attention = model.get_decoder().layers[1].self_attn
    attention.o_proj = nn.Sequential(attention.o_proj)
    assert lean_decoder(model.get_decoder()) is None


def test_attention_with_norms_between_is_packed_but_not_merged() -> None:
    model = paged_model("qwen3")
    pack_model(model)
    for layer in model.get_decoder().layers:
        assert not isinstance(layer.self_attn, MergedAttention)
        assert isinstance(layer.mlp, GatedMLP)
        assert not any(isinstance(module, nn.Linear) for module in layer.modules())


def test_packing_keeps_no_second_copy_of_a_weight() -> None:
    model = paged_model("llama-tied")
    pack_model(model)
    # Norms and the embedding table are left; packed weights are no parameters.
    assert {tuple(p.shape) for p in model.parameters()} == {(64,), (128, 64)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 6, 16, 65])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_layer_equals_the_dense_one(dtype: torch.dtype, rows: int, biased: bool) -> None:
    if not can_pack(CPU, dtype):
        pytest.skip(f"this processor has no fast {dtype}")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype) if biased else None
    inputs = torch.randn(1, rows, 32, generator=generator).to(dtype)

    packed = PackedLinear(weight, bias)(inputs)

    assert packed.shape == (1, rows, 48)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(packed, DenseLinear(weight, bias)(inputs), rtol=0, atol=tolerance)


def test_another_activation_than_silu_is_merged() -> None:
    model = paged_model("llama-gelu")
    pack_model(model)
    for layer in model.get_decoder().layers:
        assert isinstance(layer.mlp, MergedMLP)


def test_only_what_onednn_knows_is_packed() -> None:
    assert not can_pack(torch.device("cuda"), torch.float32)
    assert not can_pack(CPU, torch.float64)


@pytest.mark.parametrize("biased", [False, True])
def test_int4_computes_with_the_quantised_weights(biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 96, generator=generator)
    bias = torch.randn(48, generator=generator).to(torch.bfloat16) if biased else None
    inputs = torch.randn(1, 5, 96, generator=generator).to(torch.bfloat16)
    levels, scales, zeros = quantize(weight)

    output = Int4Linear(weight, bias)(inputs)

    expected = inputs.float() @ restored(levels, scales, zeros).t() + (0 if bias is None else bias.float())
    assert output.shape == (1, 5, 48)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.01, atol=0.1)


def test_weights_on_a_four_bit_grid_are_restored() -> None:
    # What GGUF's Q4_1 holds: 16 levels between the smallest and the largest weight of 32.
    generator = torch.Generator().manual_seed(0)
    grid = torch.randint(0, 16, (16, 2, GROUP_SIZE), generator=generator)
    grid[..., 0], grid[..., 1] = 0, 15
    weight = ((grid - 7.5) * 0.0625).flatten(1)

    levels, scales, zeros = quantize(weight)

    assert torch.equal(levels, grid.flatten(1).to(torch.int32))
    torch.testing.assert_close(restored(levels, scales, zeros), weight, rtol=0.01, atol=0.002)


def test_a_constant_group_is_restored() -> None:
    weight = restored(*quantize(torch.full((16, GROUP_SIZE), 0.5)))
    torch.testing.assert_close(weight, torch.full((16, GROUP_SIZE), 0.5))


def test_an_int4_model_computes_with_its_restored_weights() -> None:
    tokens = random_tokens(21)
    model = paged_model("llama", torch.bfloat16)
    shape = ModelShape.of_model(model)
    plain = random_model(CONFIGS["llama"])
    for layer in plain.get_decoder().layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = restored(*quantize(module.weight.data.to(torch.bfloat16).float()))
    pack_model_int4(model)

    logits = all_logits(model, shape, tokens)

    expected = plain_logits(plain, tokens)
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=-1).min() > 0.99


def test_int4_refuses_sizes_that_it_cannot_pack() -> None:
    with pytest.raises(CompatibilityError, match="48 x 40"):
        Int4Linear(torch.zeros(48, 40), None)
    with pytest.raises(CompatibilityError, match="40 x 64"):
        Int4Linear(torch.zeros(40, 64), None)


class Taken:
    """Keeps the inputs of two layers."""

    layers = (0, 2)

    def __init__(self) -> None:
        self.inputs: dict[int, torch.Tensor] = {}

    def take(self, layer: int, hidden: torch.Tensor, slots: torch.Tensor) -> None:
        self.inputs[layer] = hidden[slots.argsort()].clone()


def test_the_lean_forward_hands_over_what_enters_a_layer() -> None:
    tokens = random_tokens(6)
    model = paged_model("llama")
    shape = ModelShape.of_model(model)
    pack_model(model)
    lean = lean_decoder(model.get_decoder())
    assert lean is not None
    layout = RowLayout(
        limits=LIMITS,
        shared_heads=shape.shared_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    kv = KVPool.allocate(
        num_layers=3,
        num_blocks=8,
        block_size=8,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.float32,
        device=CPU,
        joined=True,
    )
    batch = ForwardBatch(slices=(ForwardSlice(token_ids=tokens, start=0, block_table=[3], num_logits=0),))
    taken = Taken()

    with torch.inference_mode():
        lean(ragged_batch(batch, layout), kv, taken)

    with torch.inference_mode():
        plain = random_model(CONFIGS["llama"])(torch.tensor([tokens]), output_hidden_states=True)
    for layer in taken.layers:
        torch.testing.assert_close(taken.inputs[layer], plain.hidden_states[layer][0], rtol=0, atol=1e-4)
