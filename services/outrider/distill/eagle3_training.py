"""The training loop of a head: by the clock, with checkpoints, the same for CPU and CUDA."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.errors import ConfigError
from outrider.distill.eagle3_batches import HeadBatches
from outrider.distill.eagle3_loss import HeadBatch, HeadLoss, HeadLossWeights, head_loss
from outrider.distill.training import TrainingProgress
from outrider.engine.eagle3.model import Eagle3Head

__all__ = ["HeadTrainer", "HeadTraining", "Rotary"]

Rotary = Callable[[int], tuple[Tensor, Tensor]]
"""Rotary factors, cos and sin [length, head_dim], of the first so many positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTraining:
    """How long and how fast to learn. Raises `ConfigError` naming the field that cannot work."""

    minutes: float
    """Time in the loop, over all resumed runs; the learning rate falls along it."""
    learning_rate: float = 1.5e-3
    """At its highest."""
    warmup_steps: int = 40
    final_share: float = 0.03
    """Of the highest learning rate, at the end of the cosine."""
    depths: int = 3
    """Drafted tokens that are trained for, at the end; the first alone is a third of the work, so the
    others come one by one in the second half."""
    batch_tokens: int = 2048
    """About how many tokens a step sees."""
    weight_decay: float = 0.02
    max_grad_norm: float = 1.0
    checkpoint_s: float = 120.0
    seed: int = 1
    weights: HeadLossWeights = field(default_factory=HeadLossWeights)

    def __post_init__(self) -> None:
        for name in ("minutes", "learning_rate", "depths", "batch_tokens", "checkpoint_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")


class HeadTrainer:
    """Trains a head in place, except for parameters that want no gradient."""

    def __init__(
        self, head: Eagle3Head, rotary: Rotary, settings: HeadTraining, checkpoint: Path, clock: Callable[[], float]
    ) -> None:
        """`clock` gives seconds. Resumes when `checkpoint` exists."""
        self._head = head
        self._rotary = rotary
        self._settings = settings
        self._checkpoint = checkpoint
        self._clock = clock
        self._parameters = [one for one in head.parameters() if one.requires_grad]
        matrices = [one for one in self._parameters if one.ndim > 1]
        vectors = [one for one in self._parameters if one.ndim == 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
        )
        self.steps = self.tokens = 0
        self.seconds = 0.0
        self._loss = self._agreement = 0.0
        if checkpoint.is_file():
            self._resume()

    def run(self, batches: HeadBatches, tell: Callable[[TrainingProgress], None]) -> None:
        """Train until the time is up; `tell` hears of every step."""
        self._head.train()
        saved = began = self._clock()
        before = self.seconds
        for batch in batches.shuffled(skip=self.steps):
            fraction = self.seconds / (60 * self._settings.minutes)
            if fraction >= 1:
                break
            self._step(batch, fraction)
            now = self._clock()
            self.seconds = before + now - began
            tell(
                TrainingProgress(
                    fraction=min(1.0, fraction),
                    steps=self.steps,
                    tokens=self.tokens,
                    loss=self._loss,
                    agreement=self._agreement,
                )
            )
            if now - saved >= self._settings.checkpoint_s:
                self._save()
                saved = now
        self._save()

    @torch.no_grad()
    def agreement(self, held_out: HeadBatches) -> tuple[float, ...]:
        """Share of the labelled rows whose first choice is the target's, by depth: weighted as in training."""
        self._head.eval()
        agreed = [0.0] * self._settings.depths
        rows = [1e-9] * self._settings.depths
        for batch in held_out.once():
            loss = self._forward(batch, self._settings.depths)
            for depth, (right, total) in enumerate(zip(loss.agreed, loss.rows, strict=True)):
                agreed[depth] += right
                rows[depth] += total
        return tuple(right / total for right, total in zip(agreed, rows, strict=True))

    def depths_at(self, fraction: float) -> int:
        """Drafted tokens that are trained for when this share of the time has passed."""
        depths = self._settings.depths
        return 1 + min(depths - 1, int(max(0.0, fraction - 0.5) * 2 * depths))

    def _step(self, batch: HeadBatch, fraction: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(fraction)
        result = self._forward(batch, self.depths_at(fraction))
        result.loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.tokens += batch.num_tokens
        share = max(0.02, 1 / self.steps)
        self._loss += share * (float(result.loss.detach()) - self._loss)
        self._agreement += share * (result.agreed[0] / max(result.rows[0], 1e-9) - self._agreement)

    def _forward(self, batch: HeadBatch, depths: int) -> HeadLoss:
        with torch.autocast(batch.features.device.type, torch.bfloat16):
            cos_sin = self._rotary(batch.features.shape[1])
            return head_loss(self._head, batch, cos_sin, depths=depths, weights=self._settings.weights)

    def _learning_rate(self, fraction: float) -> float:
        low = self._settings.final_share
        cosine = low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction)))
        return self._settings.learning_rate * cosine * min(1.0, (self.steps + 1) / self._settings.warmup_steps)

    def _save(self) -> None:
        state = {
            "parameters": [one.detach() for one in self._parameters],
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "smoothed": (self._loss, self._agreement),
        }
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._checkpoint.with_suffix(".tmp")
        torch.save(state, scratch)
        scratch.replace(self._checkpoint)

    def _resume(self) -> None:
        state = torch.load(self._checkpoint, map_location=self._parameters[0].device, weights_only=True)
        with torch.no_grad():
            for mine, saved in zip(self._parameters, state["parameters"], strict=True):
                mine.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps, self.tokens, self.seconds = state["steps"], state["tokens"], state["seconds"]
        self._loss, self._agreement = state["smoothed"]
