"""The sizes of a model, or of one rank's shard of it, that KV and attention depend on."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

__all__ = ["ModelShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one rank's model; the whole model's when there is one rank."""

    num_layers: int
    """Decoder layers."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key-value heads."""
    head_dim: int
    """Channels per head."""
    vocab_size: int
    """Columns of the logits."""
    max_positions: int
    """Positions that the model was trained for."""

    @property
    def shared_heads(self) -> int:
        """Query heads per KV head; the same on every rank."""
        return self.heads // self.kv_heads

    @classmethod
    def of_config(cls, config: Any) -> "ModelShape":
        """The whole model's sizes."""
        return cls(
            num_layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=_head_dim(config),
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
        )

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> "ModelShape":
        """The sizes of what this process holds: sharding may leave a rank fewer heads, unevenly.

        Read it before the projections are merged or packed.
        """
        config = model.config
        attention = model.get_decoder().layers[0].self_attn
        head_dim = _head_dim(config)
        return cls(
            num_layers=config.num_hidden_layers,
            heads=attention.q_proj.weight.shape[0] // head_dim,
            kv_heads=attention.k_proj.weight.shape[0] // head_dim,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
        )


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
