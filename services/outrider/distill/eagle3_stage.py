"""Stage two for a head: train it on the features that were sampled with the texts, and save it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.core.errors import ConfigError
from outrider.distill.batches import is_held_out
from outrider.distill.eagle3_batches import HeadBatches
from outrider.distill.eagle3_start import features_of_prefix, head_config, new_head
from outrider.distill.eagle3_training import HeadTrainer, HeadTraining, Rotary
from outrider.distill.records import LabelledText, RecordStore
from outrider.distill.settings import DistillSettings
from outrider.distill.train_stage import chosen_vocabulary
from outrider.distill.training_loop import TrainingProgress, TrainingReport
from outrider.engine.eagle3.checkpoint import save_head
from outrider.engine.eagle3.config import Eagle3Shape, load_head_config
from outrider.engine.tokenizer import Tokenizer

__all__ = ["rotary_of", "train_head"]

_CHECKPOINT = "head.pt"


def train_head(
    settings: DistillSettings,
    tokenizer: Tokenizer,
    target: Any,
    store: RecordStore,
    *,
    tell: Callable[[TrainingProgress], None],
) -> TrainingReport:
    """Train until the time is up, from the last checkpoint if there is one, and save to the output folder.

    `target` is a transformers model, which gives the output rows and the features of the common prefix.
    Raises `ConfigError` when too little was sampled, or without features.
    """
    texts = list(store.texts())
    held_out = [text for index, text in enumerate(texts) if is_held_out(index)]
    learned = [text for index, text in enumerate(texts) if not is_held_out(index)]
    if not learned:
        raise ConfigError(f"{settings.work}: {len(texts)} sampled texts are too few to train on")
    vocabulary = chosen_vocabulary(settings, tokenizer, target, texts)
    config = head_config(target.config, vocabulary)
    settings.output.mkdir(parents=True, exist_ok=True)
    (settings.output / "config.json").write_text(json.dumps(dict(config)) + "\n", encoding="utf-8")
    device = torch.device(settings.device)
    shape = Eagle3Shape.of_config(load_head_config(settings.output))
    head = new_head(shape, target, vocabulary, seed=settings.seed).to(device)
    embedding = target.get_input_embeddings().weight.detach().to(device).float()
    prefix = features_of_prefix(target, store.prefix())
    training = HeadTraining(minutes=settings.minutes.train, seed=settings.seed)
    trainer = HeadTrainer(head, rotary_of(settings.output, embedding), training, _checkpoint(settings), time.monotonic)

    def batches(of: list[LabelledText]) -> HeadBatches:
        return HeadBatches(of, prefix, vocabulary, embedding, batch_tokens=training.batch_tokens, seed=training.seed)

    trainer.run(batches(learned), tell)
    report = trainer.report(batches(held_out))
    save_head(head, config, settings.output)
    return report


def rotary_of(folder: Path, like: Tensor) -> Rotary:
    """The rotary factors of the head in a folder, on the device of `like`."""
    embedding = LlamaRotaryEmbedding(load_head_config(folder)).to(like.device)

    def factors(length: int) -> tuple[Tensor, Tensor]:
        cos, sin = embedding(like, torch.arange(length, device=like.device)[None])
        return cos[0], sin[0]

    return factors


def _checkpoint(settings: DistillSettings) -> Path:
    return settings.work / _CHECKPOINT
