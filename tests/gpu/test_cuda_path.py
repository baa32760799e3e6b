"""The CUDA path on a GPU: torch's kernel, recorded graphs, and how often the host waits."""

import warnings
from typing import Any

import pytest
import torch
from tests.unit.engine.tiny_models import random_tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.decoding.verify import VerifyRow, verify
from outrider.engine.attention import IMPLEMENTATION, register_attention
from outrider.engine.base import EngineLimits, ForwardBatch, ForwardSlice
from outrider.engine.config import EngineConfig
from outrider.engine.cuda_path import paged_options, use_device
from outrider.engine.packing import pack_model
from outrider.engine.paged_kernels import kernel_error, load_varlen_kernel
from outrider.engine.shape import ModelShape
from outrider.engine.torch_engine import TorchEngine

pytestmark = pytest.mark.gpu

LIMITS = EngineLimits(vocab_size=512, max_model_len=2048, num_blocks=16, block_size=256)
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}


def model_of(dtype: torch.dtype) -> Any:
    register_attention()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation=IMPLEMENTATION)
    # Both engines hold the same numbers: bfloat16's.
    return model.to(torch.bfloat16).to(dtype).eval()


def gpu_engine(**changes: Any) -> TorchEngine:
    settings: dict[str, Any] = {
        "model": "m",
        "device": "cuda",
        "dtype": "bfloat16",
        "block_size": 256,
        "num_blocks": 16,
    }
    config = EngineConfig(**{**settings, **changes})
    device = use_device(config.device)
    model = model_of(torch.bfloat16).to(device)
    shape = ModelShape.of_model(model)
    pack_model(model)
    return TorchEngine(model, shape, LIMITS, paged_options(config, shape, LIMITS, torch.bfloat16, device))


def cpu_engine() -> TorchEngine:
    model = model_of(torch.float32)
    shape = ModelShape.of_model(model)
    pack_model(model)
    return TorchEngine(model, shape, LIMITS)


def part(seed: int, start: int, end: int, wanted: int, blocks: list[int]) -> ForwardSlice:
    text = random_tokens(700, seed=seed, vocab_size=512)
    return ForwardSlice(token_ids=text[start:end], start=start, block_table=blocks, num_logits=wanted)


def steps() -> list[ForwardBatch]:
    """Prefill, verify rows of two widths, a roll-back, plain rows, and a chunk among them."""
    a, b = [7, 2, 9], [4, 1]
    parts = [
        (part(1, 0, 509, 3, a), part(2, 0, 250, 1, b)),
        (part(1, 509, 517, 8, a), part(2, 250, 251, 1, b)),
        (part(1, 512, 516, 4, a), part(2, 251, 259, 8, b)),
        (part(1, 516, 517, 1, a), part(2, 259, 260, 1, b)),
        (part(1, 517, 640, 5, a), part(2, 260, 264, 4, b)),
    ]
    return [ForwardBatch(slices=slices) for slices in parts]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (16, 2, 128), (32, 8, 64), (9, 3, 64), (4, 4, 64)]
)
@pytest.mark.parametrize("max_keys", [1024, 131072])
def test_the_kernel_agrees_with_the_gathered_one(heads: int, kv_heads: int, head_dim: int, max_keys: int) -> None:
    shape = ModelShape(
        num_layers=1, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab_size=8, max_positions=max_keys
    )
    kernel = load_varlen_kernel()
    assert kernel is not None
    error = kernel_error(
        kernel, shape, dtype=torch.bfloat16, block_size=256, max_keys=max_keys, device=torch.device("cuda")
    )
    assert error < 0.05


@pytest.mark.parametrize(
    "changes",
    [{}, {"cuda_graphs": "off"}, {"cuda_graphs": "startup", "graph_batch_sizes": (1, 2)}, {"attention": "gather"}],
    ids=["lazy", "eager", "startup", "gather"],
)
def test_logits_are_near_those_of_float32_on_the_cpu(changes: dict[str, Any]) -> None:
    engine, reference = gpu_engine(**changes), cpu_engine()
    for batch in steps():
        actual, expected = engine.forward(batch).cpu(), reference.forward(batch)
        assert (actual - expected).abs().max() < 0.1 * expected.std()


def test_a_step_waits_for_the_device_once() -> None:
    engine = gpu_engine()
    prefill, step, *_ = steps()
    engine.forward(prefill)
    engine.forward(step)  # records
    rows = [_row(7), _row(0)]

    _, waits = waiting(lambda: verify(engine.forward(step), rows))

    assert waits == 1


def test_a_verdict_is_the_same_on_the_gpu() -> None:
    logits = torch.randn(9, 512, generator=torch.Generator().manual_seed(5))
    rows = [_row(7), _row(0)]
    assert verify(logits.cuda(), rows) == verify(logits, rows)


def _row(drafted: int) -> VerifyRow:
    return VerifyRow(
        sampling=SamplingParams(temperature=0.8),
        prefix=[1, 2, 3],
        prompt_len=1,
        noise_key=11,
        draft_token_ids=tuple(range(drafted)),
        rule=VerificationRule.COUPLED,
    )


def waiting(act: Any) -> tuple[Any, int]:
    """What `act` returns, and how often it made the host wait for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = act()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return result, sum("synchroniz" in str(one.message) for one in caught)


def test_waiting_is_seen() -> None:
    def ask() -> Tensor:
        return torch.ones(3, device="cuda").nonzero()

    assert waiting(ask)[1] >= 1
