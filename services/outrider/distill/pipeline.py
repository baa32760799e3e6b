"""`outrider distill` from end to end: sample, train, evaluate; a stage that is done is not done again."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from outrider.core.errors import ConfigError
from outrider.distill.card import write_card
from outrider.distill.eagle3_evaluation import evaluate_head
from outrider.distill.eagle3_stage import train_head
from outrider.distill.evaluate_stage import EVALUATED_K, evaluate_draft
from outrider.distill.evaluation import ClassAcceptance
from outrider.distill.narrow import narrow_config
from outrider.distill.records import RecordStore
from outrider.distill.run_state import RunState, SampledSoFar
from outrider.distill.sample_stage import SamplingProgress, sample_texts
from outrider.distill.settings import DistillSettings
from outrider.distill.student import kept_layers
from outrider.distill.train_stage import train_draft
from outrider.distill.training_loop import TrainingProgress, TrainingReport
from outrider.engine.loading import load_config
from outrider.engine.models.catalogue import is_packaged, packaged_model, shipped_draft
from outrider.engine.models.prepare import Progress
from outrider.engine.models.resolve import resolve
from outrider.engine.progress_bars import no_bars_of_others
from outrider.engine.tokenizer import Tokenizer

__all__ = ["DistillReport", "Stage", "StageListener", "distill"]

Stage = Literal["sample", "train", "evaluate"]
StageListener = Callable[[Stage, float, str], None]
"""Hears the stage, the share of it that is done, and a few words."""

_SAMPLES = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillReport:
    """What came out."""

    folder: Path
    training: TrainingReport
    acceptance: tuple[ClassAcceptance, ...]


def distill(settings: DistillSettings, listen: StageListener, progress: Progress) -> DistillReport:
    """Make a draft for a target. Run again with the same output folder, it goes on where it was.

    Raises `ConfigError` or `CompatibilityError` naming what does not work.
    """
    with no_bars_of_others():
        return _distill(settings, listen, progress)


def _distill(settings: DistillSettings, listen: StageListener, progress: Progress) -> DistillReport:
    folder = resolve(settings.target, settings.cache_dir, progress)
    _check(settings, load_config(folder))
    tokenizer = Tokenizer(folder)
    try:
        settings.work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output: {settings.output}: {error.strerror or error}") from error
    state = RunState(settings.work)
    store = RecordStore(settings.work / _SAMPLES)
    state.claim(settings, sampled=store.num_shards > 0)
    target = _load(folder, settings)
    _sample(settings, tokenizer, target, store, state, listen, progress)

    def tell_training(now: TrainingProgress) -> None:
        listen("train", now.fraction, _words(now))

    def tell_evaluation(share: float) -> None:
        listen("evaluate", share, "")

    if settings.method == "eagle3":
        training = train_head(settings, tokenizer, target, store, tell=tell_training)
        acceptance = evaluate_head(settings, tokenizer, target, k=EVALUATED_K, tell=tell_evaluation, progress=progress)
    else:
        training = train_draft(settings, tokenizer, target, store, target_folder=folder, tell=tell_training)
        del target
        acceptance = evaluate_draft(settings, tokenizer, tell=tell_evaluation, progress=progress)
    write_card(settings, store, training, acceptance, licence=_licence(settings, folder), k=EVALUATED_K)
    return DistillReport(folder=settings.output, training=training, acceptance=tuple(acceptance))


def _check(settings: DistillSettings, target_config: Any) -> None:
    """Raise `ConfigError` for what would show only when texts have been sampled for an hour."""
    try:
        torch.empty(0, device=settings.device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: {settings.device}: {str(error).splitlines()[0]}") from error
    if settings.method == "draft_model":
        if settings.hidden_size in (None, target_config.hidden_size):
            kept_layers(target_config.num_hidden_layers, settings.draft_layers)
        else:
            narrow_config(target_config, num_layers=settings.draft_layers, hidden_size=settings.hidden_size)


def _sample(
    settings: DistillSettings,
    tokenizer: Tokenizer,
    target: Any,
    store: RecordStore,
    state: RunState,
    listen: StageListener,
    progress: Progress,
) -> None:
    """Sample for what is left of the stage's time, which the state counts over all runs."""
    before = state.sampled
    budget = 60 * settings.minutes.sample
    left = budget - before.seconds
    if left <= 0:
        return
    listen("sample", before.seconds / budget, "")

    def hear(share: float, tokens: int) -> None:
        listen("sample", (before.seconds + share * left) / budget, f"{tokens:,} tokens")

    def tell(now: SamplingProgress) -> None:
        state.note_sampled(SampledSoFar(seconds=before.seconds + now.share * left, rounds=now.rounds))
        hear(now.share, now.tokens)

    # A run that was cut off may have left a shard that it did not note.
    first_round = max(before.rounds, store.num_shards)
    sample_texts(
        settings,
        tokenizer,
        target,
        store,
        first_round=first_round,
        seconds=left,
        tell=tell,
        hear=hear,
        progress=progress,
    )


def _load(folder: Path, settings: DistillSettings) -> Any:
    """The target as a plain transformers model: it labels, and the draft starts from its layers."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[settings.dtype]
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    return model.to(settings.device).eval()


def _words(now: TrainingProgress) -> str:
    return f"step {now.steps}, loss {now.loss:.2f}, agreement {now.agreement:.3f}"


def _licence(settings: DistillSettings, folder: Path) -> str:
    """The licence of the target's weights, as the catalogue or its own card names it; `other` without one."""
    if is_packaged(settings.target) and shipped_draft(settings.target) is None:
        return packaged_model(settings.target).licence
    card = folder / "README.md"
    if card.is_file():
        for line in card.read_text(encoding="utf-8").splitlines():
            if line.startswith("license:"):
                return line.removeprefix("license:").strip()
    return "other"
