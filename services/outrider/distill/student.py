"""The draft model itself: a few of the target's layers under the target's embeddings."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.core.errors import ConfigError

__all__ = ["kept_layers", "make_student"]


def kept_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Which of the target's layers a draft of `count` layers starts from: the first ones.

    Each then reads what it was made for. Measured on SmolLM2-135M after 40 steps: 0.215 of the likeliest
    tokens agree, 0.186 where the fourth layer is the target's last one, 0.195 where two late ones follow
    two early ones. Raises `ConfigError` when the target has too few.
    """
    if not 1 <= count <= num_layers:
        raise ConfigError(f"num_layers: {count} is outside [1, {num_layers}], the target's layers")
    return tuple(range(count))


def make_student(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A float32 model of the target's kind with copies of the given layers.

    Embeddings and output head are copies of the target's and frozen: what is shared need not be
    shipped, and the head's gradient would be the dearest part of a step.
    """
    config: Any = copy.deepcopy(target.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[index] for index in layers]
    student: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        _copy(target.get_input_embeddings(), student.get_input_embeddings())
        _copy(target.get_output_embeddings(), student.get_output_embeddings())
        _copy(target.get_decoder().norm, student.get_decoder().norm)
        for place, index in enumerate(layers):
            _copy(target.get_decoder().layers[index], student.get_decoder().layers[place])
    for shared in (student.get_input_embeddings(), student.get_output_embeddings()):
        for parameter in shared.parameters():
            parameter.requires_grad_(False)
    return student


def _copy(source: Any, into: Any) -> None:
    into.load_state_dict({name: value.float() for name, value in source.state_dict().items()})
