"""Build an engine from its configuration."""

from typing import TYPE_CHECKING

from outrider.core.errors import ConfigError
from outrider.engine.base import EngineLimits, ModelEngine
from outrider.engine.config import EngineConfig
from outrider.engine.models.prepare import Progress
from outrider.engine.models.resolve import resolve

if TYPE_CHECKING:
    import torch

    from outrider.engine.shape import ModelShape

__all__ = ["build_engine", "limits_for", "torch_dtype"]


def build_engine(config: EngineConfig, progress: Progress) -> ModelEngine:
    """Prepare and load the model, and allocate its KV. Takes seconds; a first preparation, a minute.

    The calling thread computes alone from here on; `config.threads` go to the thread that runs the engine
    (`engine.forward_threads`). Raises `ConfigError` or `CompatibilityError` naming what cannot work.
    """
    if config.scripted is not None:
        from outrider.engine.scripted import ScriptedEngine

        return ScriptedEngine(config.scripted)
    if config.emulated is not None:
        from outrider.engine.emulated.clock import WallClock
        from outrider.engine.emulated.engine import EmulatedEngine

        return EmulatedEngine(config.emulated, WallClock())
    if config.kind == "eagle3":
        from outrider.engine.eagle3.build import build_eagle3

        return build_eagle3(config, progress)
    if config.tensor_parallel_size > 1:
        raise ConfigError("tensor_parallel_size: above 1 every rank builds its own part; see engine.tensor_parallel")
    return _build_torch(config, progress)


def _build_torch(config: EngineConfig, progress: Progress) -> ModelEngine:
    from outrider.engine.cuda_path import paged_options, use_device
    from outrider.engine.draft_vocabulary import read_draft_vocabulary, reduce_head, scatter_head
    from outrider.engine.eagle3.build import build_capture
    from outrider.engine.forward_threads import ForwardThreads, compute_alone
    from outrider.engine.loading import load_causal_lm, load_config
    from outrider.engine.packing import pack_model, pack_model_int4
    from outrider.engine.shape import ModelShape
    from outrider.engine.torch_engine import TorchEngine

    compute_alone()
    folder = resolve(config.model, config.cache_dir, progress)
    dtype = torch_dtype(config)
    hf_config = load_config(folder)
    shape = ModelShape.of_config(hf_config)
    # Before the weights are read: a setting that cannot work should say so at once.
    limits = limits_for(config, shape, dtype)
    own_ids = read_draft_vocabulary(folder, shape.vocab_size)
    model = load_causal_lm(folder, dtype)
    if own_ids is not None:
        reduce_head(model, own_ids)
    device = use_device(config.device)
    model.to(device=device)  # type: ignore[call-arg]
    if config.quantization == "int4":
        pack_model_int4(model)
    else:
        pack_model(model)
    if own_ids is not None:
        scatter_head(model, own_ids.to(device), shape.vocab_size)
    features = build_capture(config, hf_config, limits, device=device, progress=progress)
    options = paged_options(config, shape, limits, dtype, device)
    return TorchEngine(model, shape, limits, options, features, ForwardThreads(config.threads))


def torch_dtype(config: EngineConfig) -> "torch.dtype":
    """The torch type of `config.dtype`."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]


def limits_for(config: EngineConfig, shape: "ModelShape", dtype: "torch.dtype") -> EngineLimits:
    """What an engine of this configuration holds; `shape` is the whole model's.

    Every rank of a group computes the same: blocks are counted for the largest shard. Raises
    `ConfigError` when the settings do not fit each other or the model.
    """
    from outrider.engine.sizing import blocks_that_fit, largest_shard

    max_model_len = shape.max_positions if config.max_model_len is None else config.max_model_len
    if max_model_len > shape.max_positions:
        raise ConfigError(f"max_model_len: {max_model_len} is above the model's {shape.max_positions} positions")
    shard = largest_shard(shape, config.tensor_parallel_size)
    block_size = config.tokens_per_block
    num_blocks = config.num_blocks
    if num_blocks is None:
        if config.kv_bytes is None:
            raise ConfigError("num_blocks, kv_bytes: give one of them")
        num_blocks = blocks_that_fit(shard, kv_bytes=config.kv_bytes, block_size=block_size, dtype=dtype)
    if num_blocks * block_size < max_model_len:
        raise ConfigError(
            f"{num_blocks} KV blocks of {block_size} positions do not hold one sequence of "
            f"max_model_len {max_model_len}: raise num_blocks or kv_bytes, or lower max_model_len"
        )
    return EngineLimits(
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
    )
