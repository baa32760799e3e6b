"""How many weights a model has, from its config.json alone. Standard library only.

Counts the dense decoders of the Llama family, which are what the engine carries: grouped-query
attention, a gated MLP, RMS norms, and an output head that may be tied to the embedding. Biases and
the norms of single heads are left out: together they are less than a thousandth.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import ConfigError

__all__ = ["ModelSizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a whole model that its memory depends on."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied_head: bool
    """The output head is the embedding table."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "ModelSizes":
        """Read a parsed config.json. Raises `ConfigError` naming the key that is missing or no count."""
        heads = _count(config, "num_attention_heads")
        hidden = _count(config, "hidden_size")
        return cls(
            num_layers=_count(config, "num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=_count(config, "intermediate_size"),
            heads=heads,
            kv_heads=heads if config.get("num_key_value_heads") is None else _count(config, "num_key_value_heads"),
            head_dim=hidden // heads if config.get("head_dim") is None else _count(config, "head_dim"),
            vocab_size=_count(config, "vocab_size"),
            max_positions=_count(config, "max_position_embeddings"),
            tied_head=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def table_weights(self) -> int:
        """Weights of the embedding table, and of an output head that is not tied."""
        return self.vocab_size * self.hidden_size

    @property
    def norm_weights(self) -> int:
        """Weights of all norms: two a layer and the last one."""
        return (2 * self.num_layers + 1) * self.hidden_size

    def layer_weights(self, ranks: int) -> int:
        """Weights of one decoder layer, without norms, on the largest of `ranks` ranks.

        AutoTP shares out whole KV heads with their query heads, and the MLP's channels. Raises
        `ConfigError` when there are fewer KV heads than ranks.
        """
        queries, keys = self.query_channels(ranks), self.key_channels(ranks)
        attention = self.hidden_size * (2 * queries + 2 * keys)
        return attention + 3 * self.hidden_size * self.mlp_channels(ranks)

    def query_channels(self, ranks: int) -> int:
        """Query channels on the largest of `ranks` ranks. Raises as `layer_weights`."""
        return self.key_channels(ranks) * (self.heads // self.kv_heads)

    def key_channels(self, ranks: int) -> int:
        """Key channels, and value channels, on the largest of `ranks` ranks. Raises as `layer_weights`."""
        if not 1 <= ranks <= self.kv_heads:
            raise ConfigError(
                f"tensor_parallel_size: {ranks} ranks cannot share {self.kv_heads} KV heads; give 1 to {self.kv_heads}"
            )
        return -(-self.kv_heads // ranks) * self.head_dim

    def mlp_channels(self, ranks: int) -> int:
        """Channels of the MLP on the largest of `ranks` ranks."""
        return -(-self.intermediate_size // ranks)


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"model: config.json has {key} {value!r}, not a count; a Llama-like decoder is needed")
    return value
