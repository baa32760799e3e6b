"""Load a causal language model from a folder, or refuse it by name.

Sharding and the paged attention carry dense decoders of the Llama family. What they cannot carry
they would often run silently wrong (a sliding window ignored, a frequency that depends on the
longest sequence of the batch), so every such feature is refused before any weight is read.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.core.errors import CompatibilityError, ConfigError
from outrider.engine.attention import IMPLEMENTATION, register_attention
from outrider.engine.progress_bars import no_bars_of_others

__all__ = ["SUPPORTED_MODEL_TYPES", "check_supported", "load_causal_lm", "load_config"]

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` of the architectures that are tested."""

# These rescale with the longest sequence of the forward: a row's logits would depend on its batch.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def load_config(folder: Path) -> Any:
    """Read and check the model's configuration. Raises as `load_causal_lm` does."""
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot read the configuration in {folder}: {error}") from error
    check_supported(config)
    return config


def load_causal_lm(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model in evaluation mode, with our attention, on the CPU.

    Raises `ConfigError` when the folder cannot be read and `CompatibilityError` naming what the
    engine cannot carry.
    """
    config = load_config(folder)
    register_attention()
    try:
        with no_bars_of_others():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                str(folder), config=config, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot load the weights in {folder}: {error}") from error
    model.eval()
    return model


def check_supported(config: Any) -> None:
    """Raise `CompatibilityError` naming the first feature of `config` that is not supported."""
    for problem in (_architecture(config), _weights(config), _window(config), _rope(config)):
        if problem is not None:
            raise CompatibilityError(f"model: {problem}")


def _architecture(config: Any) -> str | None:
    if config.model_type in SUPPORTED_MODEL_TYPES:
        return None
    return f"architecture {config.model_type!r} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}"


def _weights(config: Any) -> str | None:
    if getattr(config, "quantization_config", None) is None:
        return None
    return "the checkpoint is quantised; give a full-precision checkpoint and set quantization instead"


def _window(config: Any) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"layers with {', '.join(sorted(kinds))} are not supported, only full attention"
    if getattr(config, "sliding_window", None) is not None:
        return f"sliding_window {config.sliding_window} is not supported, only full attention"
    return None


def _rope(config: Any) -> str | None:
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in _BATCH_DEPENDENT_ROPE:
        return f"rope_type {kind!r} makes a row's logits depend on the batch and is not supported"
    return None
