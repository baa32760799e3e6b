"""The model engine in one process: a transformers model over our paged KV."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.errors import EngineUnavailable
from outrider.engine.base import EngineLimits, ForwardBatch
from outrider.engine.eagle3.capture import FeatureCapture
from outrider.engine.forward_threads import ForwardThreads
from outrider.engine.paged_steps import PagedOptions
from outrider.engine.runner import ModelRunner
from outrider.engine.shape import ModelShape

__all__ = ["TorchEngine"]


class TorchEngine:
    """`ModelEngine` on one device. Implements the interface in `engine.base`."""

    def __init__(
        self,
        model: PreTrainedModel,
        shape: ModelShape,
        limits: EngineLimits,
        paged: PagedOptions | None = None,
        features: FeatureCapture | None = None,
        threads: ForwardThreads | None = None,
    ) -> None:
        """Take the model over, and allocate the whole KV pool; the rest as in `ModelRunner`."""
        self._limits = limits
        self._features = features
        self._runner: ModelRunner | None = ModelRunner(model, shape, limits, paged, features, threads)

    @property
    def limits(self) -> EngineLimits:
        """What this engine can hold."""
        return self._limits

    @property
    def features(self) -> FeatureCapture | None:
        """Implements `engine.features.HasFeatures`."""
        return self._features

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run one ragged forward pass: see `ModelEngine.forward`.

        Raises `ValueError` for a batch outside the limits and `EngineUnavailable` after `close`.
        """
        runner = self._open_runner()
        return runner.logits(runner.hidden(runner.lay_out(batch)))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the KV of whole blocks: see `ModelEngine.copy_blocks`.

        Raises `ValueError` for a block outside the pool and `EngineUnavailable` after `close`.
        """
        self._open_runner().copy_blocks(pairs)

    def close(self) -> None:
        """Release the model and its KV. Closing again changes nothing."""
        self._runner = self._features = None

    def _open_runner(self) -> ModelRunner:
        if self._runner is None:
            raise EngineUnavailable("the engine was closed")
        return self._runner
