"""Settings are checked one by one and together, before a weight is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.engine.tiny_models import CONFIGS, SIZES, plain_logits, random_tokens, save_random_model

from outrider.core.errors import CompatibilityError, ConfigError
from outrider.engine.base import ForwardBatch, ForwardSlice
from outrider.engine.config import EngineConfig
from outrider.engine.factory import build_engine, limits_for
from outrider.engine.loading import check_supported
from outrider.engine.scripted import ScriptedConfig, ScriptedEngine
from outrider.engine.shape import ModelShape
from outrider.engine.sizing import block_bytes, blocks_that_fit, largest_shard

SHAPE = ModelShape(num_layers=30, heads=9, kv_heads=3, head_dim=64, vocab_size=49152, max_positions=8192)


def ignore(_: str) -> None:
    """A progress sink."""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_blocks": 0}, "num_blocks: 0"),
        ({"block_size": -1}, "block_size: -1"),
        ({"threads": 0}, "threads: 0"),
        ({"peer_timeout_s": 0.0}, "peer_timeout_s: 0.0"),
        ({"max_model_len": 0}, "max_model_len: 0"),
        ({"kv_bytes": 1 << 20}, "only one"),
        ({"quantization": "int4", "dtype": "float32"}, "bfloat16"),
        ({"quantization": "int4", "dtype": "bfloat16", "device": "cuda"}, "CPU only"),
        ({"quantization": "int4", "dtype": "bfloat16", "tensor_parallel_size": 2}, "one process"),
        ({"kind": "scripted"}, "scripted"),
        ({"scripted": ScriptedConfig()}, "scripted"),
    ],
)
def test_a_setting_that_cannot_work_is_named(changes: dict[str, Any], problem: str) -> None:
    settings: dict[str, Any] = {"model": "m", "num_blocks": 8, **changes}
    with pytest.raises(ConfigError, match=problem):
        EngineConfig(**settings)


def test_the_pool_must_hold_the_longest_sequence() -> None:
    config = EngineConfig(model="m", num_blocks=8, block_size=16, max_model_len=129)
    with pytest.raises(ConfigError, match="8 KV blocks of 16 positions do not hold one sequence of max_model_len 129"):
        limits_for(config, SHAPE, torch.float32)


def test_a_pool_that_nobody_sized_is_refused_when_it_is_built() -> None:
    with pytest.raises(ConfigError, match="num_blocks, kv_bytes: give one of them"):
        limits_for(EngineConfig(model="m"), SHAPE, torch.float32)


def test_blocks_have_the_size_that_the_attention_wants() -> None:
    def size(**fields: Any) -> int:
        return EngineConfig(model="m", num_blocks=8, **fields).tokens_per_block

    assert size() == 16
    assert size(block_size=4) == 4
    assert size(device="cuda", dtype="bfloat16") == 256
    assert size(device="cuda", dtype="float32") == 16
    assert size(device="cuda", dtype="bfloat16", attention="gather") == 16


def test_the_model_bounds_the_length() -> None:
    config = EngineConfig(model="m", num_blocks=1024, max_model_len=8193)
    with pytest.raises(ConfigError, match="8193 is above the model's 8192"):
        limits_for(config, SHAPE, torch.float32)
    assert limits_for(EngineConfig(model="m", num_blocks=512), SHAPE, torch.float32).max_model_len == 8192


def test_a_byte_budget_is_used_to_the_last_whole_block() -> None:
    one = 2 * 30 * 16 * 3 * 64 * 4
    assert block_bytes(SHAPE, block_size=16, dtype=torch.float32) == one
    assert block_bytes(SHAPE, block_size=16, dtype=torch.bfloat16) == one // 2
    assert blocks_that_fit(SHAPE, kv_bytes=10 * one - 1, block_size=16, dtype=torch.float32) == 9
    with pytest.raises(ConfigError, match=f"{one - 1} bytes do not hold one KV block of {one} bytes"):
        blocks_that_fit(SHAPE, kv_bytes=one - 1, block_size=16, dtype=torch.float32)


@pytest.mark.parametrize(("ranks", "kv_heads", "heads"), [(1, 3, 9), (2, 2, 6), (3, 1, 3)])
def test_blocks_are_counted_for_the_largest_shard(ranks: int, kv_heads: int, heads: int) -> None:
    shard = largest_shard(SHAPE, ranks)
    assert (shard.kv_heads, shard.heads) == (kv_heads, heads)
    budget = 64 * block_bytes(shard, block_size=16, dtype=torch.float32)
    config = EngineConfig(model="m", kv_bytes=budget, max_model_len=512, tensor_parallel_size=ranks)
    assert limits_for(config, SHAPE, torch.float32).num_blocks == 64


def test_more_ranks_than_kv_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 ranks cannot share 3 KV heads"):
        largest_shard(SHAPE, 4)


def test_an_engine_is_built_from_a_folder(tmp_path: Path) -> None:
    plain = save_random_model(tmp_path, CONFIGS["llama"])
    config = EngineConfig(model=str(tmp_path), num_blocks=16, block_size=8, max_model_len=100)

    engine = build_engine(config, ignore)

    tokens = random_tokens(9)
    one = ForwardSlice(token_ids=tokens, start=0, block_table=[5, 2], num_logits=1)
    logits = engine.forward(ForwardBatch(slices=(one,)))
    torch.testing.assert_close(logits, plain_logits(plain, tokens)[-1:], rtol=0, atol=1e-4)
    assert engine.limits.max_model_len == 100


def test_a_scripted_engine_is_chosen_by_ordinary_settings() -> None:
    config = EngineConfig(model="scripted", kind="scripted", scripted=ScriptedConfig(vocab_size=32))
    engine = build_engine(config, ignore)
    assert isinstance(engine, ScriptedEngine)
    assert engine.limits.vocab_size == 32


def test_a_tensor_parallel_engine_is_not_built_by_one_process(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path), num_blocks=16, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        build_engine(config, ignore)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("mistral", {"sliding_window": 64}, "sliding_window 64"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ("llama", {"model_type": "mamba"}, "architecture 'mamba' is not supported; supported: llama"),
    ],
)
def test_what_the_engine_cannot_carry_is_refused_by_name(name: str, changes: dict[str, Any], problem: str) -> None:
    config = type(CONFIGS[name])(**SIZES)
    config.sliding_window = None
    check_supported(config)
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(CompatibilityError, match=problem):
        check_supported(config)


def test_a_folder_without_weights_is_a_settings_error(tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot load the weights"):
        build_engine(EngineConfig(model=str(tmp_path), num_blocks=64), ignore)
