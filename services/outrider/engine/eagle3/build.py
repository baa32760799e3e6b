"""Build both ends of a head from configuration: the draft's engine, and the target's capture of features."""

from pathlib import Path
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.core.errors import CompatibilityError, ConfigError
from outrider.engine.base import EngineLimits
from outrider.engine.config import EngineConfig
from outrider.engine.eagle3.capture import FeatureCapture, feature_layers
from outrider.engine.eagle3.checkpoint import load_embedding, load_head
from outrider.engine.eagle3.config import Eagle3Shape, load_head_config
from outrider.engine.eagle3.engine import Eagle3Engine
from outrider.engine.eagle3.packed import PackedHead
from outrider.engine.forward_threads import ForwardThreads, compute_alone
from outrider.engine.loading import load_config
from outrider.engine.models.prepare import Progress
from outrider.engine.models.resolve import resolve, resolve_head
from outrider.engine.shape import ModelShape

__all__ = ["build_capture", "build_eagle3"]


def build_eagle3(config: EngineConfig, progress: Progress) -> Eagle3Engine:
    """The engine of kind `eagle3`. Raises `ConfigError` or `CompatibilityError` naming what cannot work."""
    from outrider.engine.cuda_path import use_device
    from outrider.engine.factory import limits_for, torch_dtype

    if config.head_of is None:
        raise ConfigError("head_of: an EAGLE-3 head needs the target whose embedding it shares")
    compute_alone()
    folder = resolve_head(config.model, config.cache_dir, progress)
    hf_config = load_head_config(folder)
    shape = Eagle3Shape.of_config(hf_config)
    target_folder = resolve(config.head_of, config.cache_dir, progress)
    target = load_config(target_folder)
    if target.vocab_size != shape.vocab_size:
        raise CompatibilityError(
            f"draft: the head is for {shape.vocab_size} ids, the target {config.head_of!r} has {target.vocab_size}"
        )
    feature_layers(shape, num_layers=target.num_hidden_layers, hidden_size=target.hidden_size)
    limits = limits_for(config, _pool_shape(shape, target), torch_dtype(config))
    head, embedding = load_head(folder, shape)
    if embedding is None:
        embedding = load_embedding(target_folder, shape)
    device = use_device(config.device)
    packed = PackedHead(head, embedding, vocab_size=shape.vocab_size, dtype=torch_dtype(config), device=device)
    return Eagle3Engine(packed, LlamaRotaryEmbedding(hf_config).to(device), limits, ForwardThreads(config.threads))


def build_capture(
    config: EngineConfig, target: Any, limits: EngineLimits, *, device: torch.device, progress: Progress
) -> FeatureCapture | None:
    """What a target stores features with for `config.feature_head`; None when it names no head.

    `target` is the target's Hugging Face configuration. Raises as `build_eagle3`.
    """
    from outrider.engine.factory import torch_dtype

    if config.feature_head is None:
        return None
    folder: Path = resolve_head(config.feature_head, config.cache_dir, progress)
    shape = Eagle3Shape.of_config(load_head_config(folder))
    layers = feature_layers(shape, num_layers=target.num_hidden_layers, hidden_size=target.hidden_size)
    head, _ = load_head(folder, shape)
    return FeatureCapture(head.fc.weight, layers, limits, dtype=torch_dtype(config), device=device)


def _pool_shape(shape: Eagle3Shape, target: Any) -> ModelShape:
    """What the size of the head's KV depends on. It reaches as far as its target: positions are relative."""
    return ModelShape(
        num_layers=1,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_positions=target.max_position_embeddings,
    )
