"""What a head's config.json says: sizes, and which of the target's layers it reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.errors import CompatibilityError, ConfigError

__all__ = ["Eagle3Shape", "default_feature_layers", "load_head_config"]

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Shape:
    """Sizes of a head."""

    hidden_size: int
    """Width of its only layer, of the embeddings and of the fused features."""
    target_hidden_size: int
    """Width of each of the three features that are fused into one."""
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding: the target's ids."""
    draft_vocab_size: int
    """Ids that the head can draft."""
    norm_eps: float
    feature_layers: tuple[int, int, int] | None
    """Decoder layers of the target whose inputs are the features; None: see `default_feature_layers`."""

    @classmethod
    def of_config(cls, config: Any) -> "Eagle3Shape":
        """Read a Hugging Face configuration. Raises `CompatibilityError` naming what is missing or unknown."""
        draft_vocab_size = getattr(config, "draft_vocab_size", None)
        if draft_vocab_size is None:
            raise CompatibilityError("draft: config.json has no draft_vocab_size, so it is no EAGLE-3 head")
        if config.num_hidden_layers != 1:
            raise CompatibilityError(f"draft: a head with {config.num_hidden_layers} layers is not supported, only one")
        if config.hidden_act != "silu":
            raise CompatibilityError(f"draft: hidden_act {config.hidden_act!r} is not supported, only silu")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            target_hidden_size=getattr(config, "target_hidden_size", None) or config.hidden_size,
            intermediate_size=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=int(head_dim),
            vocab_size=config.vocab_size,
            draft_vocab_size=int(draft_vocab_size),
            norm_eps=config.rms_norm_eps,
            feature_layers=_feature_layers(config),
        )


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high layer of a target with so many layers, where the head does not name them.

    The feature is what goes *into* the layer: published heads were trained on these. A target of less
    than seven layers, for which there are none, gives its first, middle and last. Raises
    `CompatibilityError` for one too small to have three different ones.
    """
    layers = (2, num_layers // 2, num_layers - 3) if num_layers > 6 else (0, num_layers // 2, num_layers - 1)
    if not layers[0] < layers[1] < layers[2]:
        raise CompatibilityError(
            f"target: {num_layers} layers have no three different features at layers {layers}; "
            f"name them in the head's config.json as {_LAYER_IDS}"
        )
    return layers


def load_head_config(folder: Path) -> Any:
    """Read config.json of a head as a Hugging Face configuration. Raises `ConfigError`."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"draft: cannot read the head's configuration in {folder}: {error}") from error


def _feature_layers(config: Any) -> tuple[int, int, int] | None:
    nested = getattr(config, "eagle_config", None) or {}
    named = getattr(config, _LAYER_IDS, None) or nested.get(_LAYER_IDS)
    if named is None:
        return None
    layers = tuple(int(one) for one in named)
    if len(layers) != 3 or sorted(set(layers)) != list(layers) or layers[0] < 0:
        raise CompatibilityError(f"draft: {_LAYER_IDS} {named} are not three ascending layers")
    return layers[0], layers[1], layers[2]
