"""The training loop of a draft model: by the clock, with checkpoints, the same for CPU and CUDA."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.errors import ConfigError
from outrider.distill.batches import Batch, TextBatches
from outrider.distill.objective import Labels, LossWeights, blended_loss

__all__ = ["Trainer", "TrainingProgress", "TrainingReport", "TrainingSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How long and how fast to learn. Raises `ConfigError` naming the field that cannot work."""

    minutes: float
    """Time in the loop, over all resumed runs; the learning rate falls along it."""
    learning_rate: float = 2e-3
    """At its highest."""
    warmup_steps: int = 40
    """Steps in which it rises."""
    final_share: float = 0.03
    """Of the highest learning rate, at the end of the cosine."""
    frozen_until: float = 0.0
    """Share of the time in which only the upper two layers learn: a step then costs two thirds, and
    what the lower ones hand on is still what the target's upper layers were made for."""
    batch_tokens: int = 2048
    """About how many tokens a step sees."""
    weight_decay: float = 0.02
    max_grad_norm: float = 1.0
    checkpoint_s: float = 120.0
    """Seconds between two checkpoints."""
    seed: int = 1
    weights: LossWeights = field(default_factory=LossWeights)

    def __post_init__(self) -> None:
        for name in ("minutes", "learning_rate", "batch_tokens", "checkpoint_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """Where the loop stands, for a progress bar."""

    fraction: float
    """Of the time."""
    steps: int
    tokens: int
    loss: float
    """Smoothed."""
    agreement: float
    """Smoothed share of training positions whose likeliest token agrees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """What the loop did, over all resumed runs."""

    steps: int
    tokens: int
    """Seen, with repetitions."""
    seconds: float
    held_out_agreement: float
    """Share of held-out texts' labelled positions, weighted, whose likeliest token agrees."""


class Trainer:
    """Trains a student in place. The rows `head` [v, hidden_size] of its vocabulary are constant."""

    def __init__(
        self,
        student: Any,
        head: Tensor,
        settings: TrainingSettings,
        checkpoint: Path,
        clock: Callable[[], float],
        projection: Tensor | None = None,
    ) -> None:
        """`student` is a transformers model; `clock` gives seconds. Resumes when `checkpoint` exists.

        `projection` [target's width, student's width]: of the hidden states to learn, for a narrow student.
        """
        self._student = student
        self._decoder: nn.Module = student.get_decoder()
        self._device = head.device
        self._head = head
        self._projection = projection
        self._settings = settings
        self._checkpoint = checkpoint
        self._clock = clock
        self._parameters: list[nn.Parameter] = [one for one in student.parameters() if one.requires_grad]
        # Norms are not pulled towards zero.
        groups: list[dict[str, Any]] = [
            {"params": [one for one in self._parameters if one.ndim > 1]},
            {"params": [one for one in self._parameters if one.ndim == 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
        )
        layers = list(student.get_decoder().layers)
        self._lower = [one for layer in layers[:-2] for one in layer.parameters()]
        self._steps = self._tokens = 0
        self._seconds = 0.0
        self._loss = self._agreement = 0.0
        if checkpoint.is_file():
            self._resume()

    def run(self, batches: TextBatches, tell: Callable[[TrainingProgress], None]) -> None:
        """Train until the time is up; `tell` hears of every step."""
        self._student.train()
        saved = began = self._clock()
        before = self._seconds
        for batch in batches.shuffled(skip=self._steps):
            fraction = self._seconds / (60 * self._settings.minutes)
            if fraction >= 1:
                break
            self._step(batch, fraction)
            now = self._clock()
            self._seconds = before + now - began
            tell(
                TrainingProgress(
                    fraction=min(1.0, fraction),
                    steps=self._steps,
                    tokens=self._tokens,
                    loss=self._loss,
                    agreement=self._agreement,
                )
            )
            if now - saved >= self._settings.checkpoint_s:
                self._save()
                saved = now
        self._save()

    @torch.no_grad()
    def report(self, held_out: TextBatches) -> TrainingReport:
        """The figures so far, with the agreement on texts that were not trained on."""
        self._student.eval()
        agreeing = weight = 0.0
        for batch in held_out.once():
            _, agreement = self._forward(batch)
            part = float(batch.labels.weight.sum())
            agreeing += float(agreement) * part
            weight += part
        return TrainingReport(
            steps=self._steps,
            tokens=self._tokens,
            seconds=self._seconds,
            held_out_agreement=agreeing / max(weight, 1e-6),
        )

    def _step(self, batch: Batch, fraction: float) -> None:
        learns = fraction >= self._settings.frozen_until
        for one in self._lower:
            one.requires_grad_(learns)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(fraction)
        loss, agreement = self._forward(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        self._tokens += batch.num_tokens
        share = max(0.02, 1 / self._steps)
        self._loss += share * (float(loss.detach()) - self._loss)
        self._agreement += share * (float(agreement) - self._agreement)

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.autocast(self._device.type, torch.bfloat16):
            output = self._decoder(input_ids=batch.ids.to(self._device), use_cache=False)
        hidden = output.last_hidden_state.flatten(0, 1)[batch.rows.to(self._device)]
        labels = batch.labels
        moved = Labels(
            columns=labels.columns.to(self._device),
            logp=labels.logp.to(self._device),
            hidden=self._projected(labels.hidden.to(self._device)),
            weight=labels.weight.to(self._device),
        )
        return blended_loss(hidden, self._head, moved, self._settings.weights)

    def _projected(self, hidden: Tensor) -> Tensor:
        return hidden if self._projection is None else hidden.float() @ self._projection

    def _learning_rate(self, fraction: float) -> float:
        low = self._settings.final_share
        cosine = low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction)))
        return self._settings.learning_rate * cosine * min(1.0, (self._steps + 1) / self._settings.warmup_steps)

    def _save(self) -> None:
        state = {
            "parameters": [one.detach() for one in self._parameters],
            "optimizer": self._optimizer.state_dict(),
            "steps": self._steps,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "smoothed": (self._loss, self._agreement),
        }
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._checkpoint.with_suffix(".tmp")
        torch.save(state, scratch)
        scratch.replace(self._checkpoint)

    def _resume(self) -> None:
        state = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
        with torch.no_grad():
            for mine, saved in zip(self._parameters, state["parameters"], strict=True):
                mine.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self._steps, self._tokens, self._seconds = state["steps"], state["tokens"], state["seconds"]
        self._loss, self._agreement = state["smoothed"]
