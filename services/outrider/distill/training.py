"""Training a draft model on what its target would have said."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.distill.batches import Batch, TextBatches
from outrider.distill.objective import Labels, LossWeights, blended_loss
from outrider.distill.training_loop import LoopSettings, TrainingLoop, TrainingProgress, TrainingReport

__all__ = ["Trainer", "TrainingSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings(LoopSettings):
    """How a draft model learns."""

    weights: LossWeights = field(default_factory=LossWeights)


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
        """`student` is a transformers model; the rest as in `TrainingLoop`.

        `projection` [target's width, student's width]: of the hidden states to learn, for a narrow student.
        """
        self._student = student
        self._decoder: nn.Module = student.get_decoder()
        self._device = head.device
        self._head = head
        self._projection = projection
        self._weights = settings.weights
        learning = [one for one in student.parameters() if one.requires_grad]
        self._loop = TrainingLoop(learning, settings, checkpoint, clock)

    def run(self, batches: TextBatches, tell: Callable[[TrainingProgress], None]) -> None:
        """See `TrainingLoop.run`."""
        self._student.train()

        def forward(batch: Batch, fraction: float) -> tuple[Tensor, float]:
            loss, agreement = self._forward(batch)
            return loss, float(agreement)

        self._loop.run(batches.shuffled(skip=self._loop.steps), forward, tell)

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
        return self._loop.report(agreeing / max(weight, 1e-6))

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
        return blended_loss(hidden, self._head, moved, self._weights)

    def _projected(self, hidden: Tensor) -> Tensor:
        return hidden if self._projection is None else hidden.float() @ self._projection
