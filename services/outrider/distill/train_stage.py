"""Stage two: train the draft model on what was sampled, and save it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider.core.errors import ConfigError
from outrider.distill.batches import TextBatches, is_held_out
from outrider.distill.export import save_draft
from outrider.distill.narrow import make_narrow_student
from outrider.distill.records import LabelledText, RecordStore
from outrider.distill.settings import DistillSettings
from outrider.distill.student import kept_layers, make_student
from outrider.distill.training import Trainer, TrainingSettings
from outrider.distill.training_loop import TrainingProgress, TrainingReport
from outrider.distill.vocabulary import DraftVocabulary
from outrider.engine.tokenizer import Tokenizer

__all__ = ["chosen_vocabulary", "train_draft"]

_CHECKPOINT = "training.pt"
_VOCABULARY = "vocabulary.json"


def train_draft(
    settings: DistillSettings,
    tokenizer: Tokenizer,
    target: Any,
    store: RecordStore,
    *,
    target_folder: Path,
    tell: Callable[[TrainingProgress], None],
) -> TrainingReport:
    """Train until the time is up, from the last checkpoint if there is one, and save to the output folder.

    `target` gives its first layers and its embeddings. Raises `ConfigError` when too little was sampled.
    """
    texts = list(store.texts())
    held_out = [text for index, text in enumerate(texts) if is_held_out(index)]
    learned = [text for index, text in enumerate(texts) if not is_held_out(index)]
    if not learned:
        raise ConfigError(f"{settings.work}: {len(texts)} sampled texts are too few to train on")
    torch.manual_seed(settings.seed)
    vocabulary = chosen_vocabulary(settings, tokenizer, target, texts)
    device = torch.device(settings.device)
    projection = None
    if settings.hidden_size is None or settings.hidden_size == target.config.hidden_size:
        student = make_student(target, kept_layers(target.config.num_hidden_layers, settings.draft_layers))
    else:
        student, projection = make_narrow_student(
            target, num_layers=settings.draft_layers, hidden_size=settings.hidden_size
        )
        projection = projection.to(device)
    student.to(device=device)  # type: ignore[call-arg]
    head = student.get_output_embeddings().weight.detach()[vocabulary.token_ids.to(device)].clone()
    training = TrainingSettings(minutes=settings.minutes.train, seed=settings.seed)
    trainer = Trainer(student, head, training, settings.work / _CHECKPOINT, time.monotonic, projection)

    def batches(of: list[LabelledText]) -> TextBatches:
        return TextBatches(of, store.prefix(), vocabulary, batch_tokens=training.batch_tokens, seed=training.seed)

    trainer.run(batches(learned), tell)
    report = trainer.report(batches(held_out))
    save_draft(student, vocabulary.token_ids, target_folder=target_folder, output=settings.output)
    return report


def chosen_vocabulary(
    settings: DistillSettings, tokenizer: Tokenizer, target: Any, texts: list[LabelledText]
) -> DraftVocabulary:
    """The draft's vocabulary, as an earlier run chose it: a checkpoint belongs to one."""
    full_size = int(target.config.vocab_size)
    path = settings.work / _VOCABULARY
    if path.is_file():
        return DraftVocabulary(torch.tensor(json.loads(path.read_text(encoding="utf-8"))), full_size)
    vocabulary = DraftVocabulary.of_texts(
        texts,
        size=min(settings.vocabulary_size, tokenizer.vocab_size),
        full_size=full_size,
        always=tokenizer.eos_token_ids,
    )
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(vocabulary.token_ids.tolist()) + "\n", encoding="utf-8")
    scratch.replace(path)
    return vocabulary
