"""A tiny random target with a byte tokenizer: a folder that the whole tool can work on."""

from pathlib import Path
from typing import Any

from tests.unit.engine.byte_tokenizer import save_byte_tokenizer
from tests.unit.engine.tiny_models import SIZES, save_random_model
from transformers import LlamaConfig, PreTrainedModel

TOKENIZER_SIZE = 264
VOCAB_SIZE = 272
"""Of the model: the tokenizer's ids, and some padding."""


def save_tiny_target(folder: Path) -> PreTrainedModel:
    """Save model and tokenizer; returns the model."""
    sizes: dict[str, Any] = SIZES | {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": True}
    model = save_random_model(folder, LlamaConfig(**sizes))
    save_byte_tokenizer(folder)
    return model
