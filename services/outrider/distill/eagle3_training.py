"""Training an EAGLE-3 head on its target's features, and on its own outputs for later positions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.distill.eagle3_batches import HeadBatches
from outrider.distill.eagle3_loss import HeadBatch, HeadLoss, HeadLossWeights, head_loss
from outrider.distill.training_loop import LoopSettings, TrainingLoop, TrainingProgress, TrainingReport
from outrider.engine.eagle3.model import Eagle3Head

__all__ = ["HeadTrainer", "HeadTraining", "Rotary"]

Rotary = Callable[[int], tuple[Tensor, Tensor]]
"""Rotary factors, cos and sin [length, head_dim], of the first so many positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTraining(LoopSettings):
    """How a head learns. Raises `ConfigError` naming the field that cannot work."""

    learning_rate: float = 1.5e-3
    depths: int = 3
    """Drafted tokens that are trained for, at the end; the first alone is a third of the work, so the
    others come one by one in the second half."""
    weights: HeadLossWeights = field(default_factory=HeadLossWeights)

    def __post_init__(self) -> None:
        # With slots the class is made anew, and `super()` would look for the old one.
        LoopSettings.__post_init__(self)
        if self.depths < 1:
            raise ConfigError(f"depths: {self.depths} is not above 0")


class HeadTrainer:
    """Trains a head in place, except for parameters that want no gradient."""

    def __init__(
        self, head: Eagle3Head, rotary: Rotary, settings: HeadTraining, checkpoint: Path, clock: Callable[[], float]
    ) -> None:
        """`checkpoint` and `clock` as in `TrainingLoop`."""
        self._head = head
        self._rotary = rotary
        self._settings = settings
        learning = [one for one in head.parameters() if one.requires_grad]
        self._loop = TrainingLoop(learning, settings, checkpoint, clock)

    def run(self, batches: HeadBatches, tell: Callable[[TrainingProgress], None]) -> None:
        """See `TrainingLoop.run`."""
        self._head.train()

        def forward(batch: HeadBatch, fraction: float) -> tuple[Tensor, float]:
            result = self._forward(batch, self.depths_at(fraction))
            return result.loss, result.agreed[0] / max(result.rows[0], 1e-9)

        self._loop.run(batches.shuffled(skip=self._loop.steps), forward, tell)

    @torch.no_grad()
    def report(self, held_out: HeadBatches) -> TrainingReport:
        """The figures so far, with the agreement of the first drafted token on texts that were not trained on."""
        self._head.eval()
        agreed = rows = 0.0
        for batch in held_out.once():
            loss = self._forward(batch, depths=1)
            agreed += loss.agreed[0]
            rows += loss.rows[0]
        return self._loop.report(agreed / max(rows, 1e-9))

    def depths_at(self, fraction: float) -> int:
        """Drafted tokens that are trained for when this share of the time has passed."""
        depths = self._settings.depths
        return 1 + min(depths - 1, int(max(0.0, fraction - 0.5) * 2 * depths))

    def _forward(self, batch: HeadBatch, depths: int) -> HeadLoss:
        with torch.autocast(batch.features.device.type, torch.bfloat16):
            cos_sin = self._rotary(batch.features.shape[1])
            return head_loss(self._head, batch, cos_sin, depths=depths, weights=self._settings.weights)
