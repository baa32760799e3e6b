"""The model engine in one process: a transformers model over our paged KV."""

from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.errors import EngineUnavailable
from outrider.engine.base import EngineLimits, ForwardBatch
from outrider.engine.runner import ModelRunner
from outrider.engine.shape import ModelShape

__all__ = ["TorchEngine"]


class TorchEngine:
    """`ModelEngine` on one device. Implements the interface in `engine.base`."""

    def __init__(self, model: PreTrainedModel, shape: ModelShape, limits: EngineLimits) -> None:
        """Take the model over, and allocate the whole KV pool."""
        self._limits = limits
        self._runner: ModelRunner | None = ModelRunner(model, shape, limits)

    @property
    def limits(self) -> EngineLimits:
        """What this engine can hold."""
        return self._limits

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run one ragged forward pass: see `ModelEngine.forward`.

        Raises `ValueError` for a batch outside the limits and `EngineUnavailable` after `close`.
        """
        if self._runner is None:
            raise EngineUnavailable("the engine was closed")
        return self._runner.logits(self._runner.hidden(self._runner.lay_out(batch)))

    def close(self) -> None:
        """Release the model and its KV. Closing again changes nothing."""
        self._runner = None
