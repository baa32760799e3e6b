"""A draft narrower than its target: embeddings by principal components, layers from scratch."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.core.errors import ConfigError

__all__ = ["make_narrow_student", "narrow_config", "principal_components"]


def principal_components(table: Tensor, count: int) -> Tensor:
    """The directions that hold most of a table [rows, width]: orthonormal, [width, count].

    Not centred, so that products with the table's rows are kept as well as `count` directions can.
    """
    values = table.double()
    _, directions = torch.linalg.eigh(values.T @ values)  # ascending
    components: Tensor = directions[:, -count:].flip(1).float()
    return components


def narrow_config(target_config: Any, *, num_layers: int, hidden_size: int) -> Any:
    """The target's configuration with fewer channels, and heads in proportion.

    Raises `ConfigError` when the width cannot be had.
    """
    config: Any = copy.deepcopy(target_config)
    width = int(config.hidden_size)
    if not 1 <= hidden_size < width:
        raise ConfigError(f"hidden_size: {hidden_size} is outside [1, {width}), the target's channels")
    head_dim = int(getattr(config, "head_dim", None) or width // config.num_attention_heads)
    shared = config.num_attention_heads // config.num_key_value_heads
    config.num_key_value_heads = max(1, hidden_size // head_dim // shared)
    config.num_attention_heads = config.num_key_value_heads * shared
    config.head_dim = head_dim
    config.intermediate_size = max(1, config.intermediate_size * hidden_size // width)
    config.hidden_size = hidden_size
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:num_layers]
    return config


def make_narrow_student(target: Any, *, num_layers: int, hidden_size: int) -> tuple[PreTrainedModel, Tensor]:
    """A float32 model of the target's kind with fewer channels, and the projection of hidden states to it.

    Embeddings and output head are the target's, projected to their principal components, and frozen:
    the head applied to a projected hidden state [.., width] @ projection [width, hidden_size] comes as
    near to the target's logits as so few channels can. Layers start at random. Raises `ConfigError`
    when the width cannot be had.
    """
    config = narrow_config(target.config, num_layers=num_layers, hidden_size=hidden_size)
    student: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    head = target.get_output_embeddings().weight.detach().float()
    projection = principal_components(head, hidden_size)
    _set(student.get_output_embeddings(), head @ projection)
    if not config.tie_word_embeddings:
        table = target.get_input_embeddings().weight.detach().float()
        _set(student.get_input_embeddings(), table @ principal_components(table, hidden_size))
    return student, projection


def _set(module: Any, weight: Tensor) -> None:
    with torch.no_grad():
        module.weight.copy_(weight)
    module.weight.requires_grad_(False)
