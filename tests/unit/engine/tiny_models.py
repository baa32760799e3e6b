"""Tiny random models with fixed seeds, and what plain transformers says about them."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    # The default 0.02 gives nearly uniform logits, in which a wrong row would hardly show.
    "initializer_range": 0.2,
}

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-gelu": LlamaConfig(**SIZES, hidden_act="gelu_pytorch_tanh"),
    "llama3-rope": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
}


def random_model(config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 7) -> PreTrainedModel:
    """A plain transformers model with random weights; biases and norms too, which start as constants."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            # A copy: the model keeps its configuration, and the way it attends stands in there.
            deepcopy(config),
            attn_implementation="eager",
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.to(dtype=dtype)  # type: ignore[call-arg]
    model.eval()
    return model


def save_random_model(folder: Path, config: Any) -> PreTrainedModel:
    """Save a random model as a Hugging Face folder; returns it."""
    model = random_model(config)
    model.save_pretrained(str(folder))
    return model


def random_tokens(count: int, *, seed: int = 0, vocab_size: int = 128) -> list[int]:
    """Token ids that depend on nothing but the arguments."""
    generator = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(0, vocab_size, (count,), generator=generator)]


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Logits of every position from one plain forward without a cache; [len(tokens), vocab_size]."""
    logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits.float()
