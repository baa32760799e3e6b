"""One process's share of a forward: the layers, their KV pool, and the logits of the rows asked for."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.engine.attention import AttentionBatch, KVPool
from outrider.engine.base import EngineLimits, ForwardBatch
from outrider.engine.eagle3.capture import FeatureCapture
from outrider.engine.forward_threads import ForwardThreads
from outrider.engine.lean_decoder import lean_decoder
from outrider.engine.paged_steps import PagedOptions, PagedSteps
from outrider.engine.ragged import RaggedBatch, RowLayout, check_batch, ragged_batch
from outrider.engine.shape import ModelShape
from outrider.engine.step_graphs import Run

__all__ = ["ModelRunner"]


class ModelRunner:
    """Runs ragged batches through a model. Owns the KV pool; one thread calls it.

    A tensor-parallel rank runs the same code on its shard: the layers reduce among themselves, and
    only the rank that decides asks for logits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: ModelShape,
        limits: EngineLimits,
        paged: PagedOptions | None = None,
        features: FeatureCapture | None = None,
        threads: ForwardThreads | None = None,
    ) -> None:
        """Allocate the KV pool. Without `paged`, attention gathers groups of slices.

        `features`: what the inputs of some layers are handed to, in every forward. `threads`: those of
        the thread that calls; None: as many as it has.
        """
        self._threads = threads
        self._decoder = model.get_decoder()
        self.features = features
        """Where the features of every row with KV are; None: they are not kept."""
        if features is not None:
            features.attach(self._decoder.layers)
        self._lean = lean_decoder(self._decoder) if paged is None else None
        self._lm_head = model.get_output_embeddings()
        embedding: Tensor = cast("nn.Embedding", model.get_input_embeddings()).weight
        self._layout = RowLayout(
            limits=limits,
            shared_heads=shape.shared_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=embedding.dtype,
            device=embedding.device,
        )
        self._kv = KVPool.allocate(
            num_layers=shape.num_layers,
            num_blocks=limits.num_blocks + (0 if paged is None else 1),
            block_size=limits.block_size,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=embedding.dtype,
            device=embedding.device,
            joined=paged is None,
        )
        # A mask of four dimensions goes through transformers untouched, and attention of ours reads
        # none. Without it, transformers looks for packed sequences, which makes a device wait.
        self._no_mask = torch.empty(1, 1, 1, 1, device=embedding.device)
        self._paged = None if paged is None else PagedSteps(self._layers, limits, paged, embedding.device)
        if self._paged is not None and paged is not None and paged.record_at_start:
            self._record_all(self._paged)

    @torch.inference_mode()
    def lay_out(self, batch: ForwardBatch) -> Run:
        """Check the batch and lay it out; returns the forward, for `hidden`. Writes nothing.

        Raises `ValueError` when the batch does not fit the limits.
        """
        if self._threads is not None:
            self._threads.claim()
        check_batch(batch, self._layout.limits)
        if self._paged is not None:
            return self._paged.prepare(batch)
        ragged = ragged_batch(batch, self._layout)
        return lambda: self._gathering(ragged).index_select(0, ragged.logit_rows)

    @torch.inference_mode()
    def hidden(self, forward: Run) -> Tensor:
        """Run the layers, write the KV of every row, and return the last hidden states.

        The states are those of the rows that want logits: [sum of num_logits, hidden_size].
        """
        return forward()

    def check_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Raise `ValueError` when a pair names a block outside the pool."""
        last = self._layout.limits.num_blocks - 1
        if not all(0 <= block <= last for pair in pairs for block in pair):
            raise ValueError(f"block id outside 0..{last}")

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the KV of whole blocks, (source, destination) in order. Raises as `check_blocks`."""
        self.check_blocks(pairs)
        self._kv.copy_blocks(pairs)
        if self.features is not None:
            self.features.copy_blocks(pairs)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states [n, hidden_size]: [n, vocab_size], float32."""
        if hidden.shape[0] == 0:
            return hidden.new_zeros((0, self._layout.limits.vocab_size), dtype=torch.float32)
        logits: Tensor = self._lm_head(hidden)
        return logits.float()

    @torch.inference_mode()
    def _record_all(self, steps: PagedSteps) -> None:
        steps.record_all()

    def _gathering(self, batch: RaggedBatch) -> Tensor:
        """The decoder over a batch without a paged kernel."""
        if self._lean is not None:
            return self._lean(batch, self._kv, self.features)
        return self._layers(batch.input_ids, batch.position_ids, batch)

    def _layers(self, input_ids: Tensor, position_ids: Tensor, batch: AttentionBatch) -> Tensor:
        """The decoder over one flattened batch: [total] to [total, hidden_size]."""
        output = self._decoder(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            attention_mask=self._no_mask,
            use_cache=False,
            ragged=batch,
            kv=self._kv,
        )
        hidden: Tensor = output.last_hidden_state.squeeze(0)
        return hidden
