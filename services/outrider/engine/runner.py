"""One process's share of a forward: the layers, their KV pool, and the logits of the rows asked for."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.engine.attention import KVPool
from outrider.engine.base import EngineLimits, ForwardBatch
from outrider.engine.ragged import RaggedBatch, RowLayout, ragged_batch
from outrider.engine.shape import ModelShape

__all__ = ["ModelRunner"]


class ModelRunner:
    """Runs ragged batches through a model. Owns the KV pool; one thread calls it.

    A tensor-parallel rank runs the same code on its shard: the layers reduce among themselves, and
    only the rank that decides asks for logits.
    """

    def __init__(self, model: PreTrainedModel, shape: ModelShape, limits: EngineLimits) -> None:
        self._decoder = model.get_decoder()
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
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=embedding.dtype,
            device=embedding.device,
        )

    @torch.inference_mode()
    def lay_out(self, batch: ForwardBatch) -> RaggedBatch:
        """Check the batch and make its tensors; writes nothing.

        Raises `ValueError` when the batch does not fit the limits.
        """
        return ragged_batch(batch, self._layout)

    @torch.inference_mode()
    def hidden(self, ragged: RaggedBatch) -> Tensor:
        """Run the layers, write the KV of every row, and return the last hidden states.

        The states are those of the rows that want logits: [sum of num_logits, hidden_size].
        """
        output = self._decoder(
            input_ids=ragged.input_ids, position_ids=ragged.position_ids, use_cache=False, ragged=ragged, kv=self._kv
        )
        rows: Tensor = output.last_hidden_state.squeeze(0).index_select(0, ragged.logit_rows)
        return rows

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

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states [n, hidden_size]: [n, vocab_size], float32."""
        if hidden.shape[0] == 0:
            return hidden.new_zeros((0, self._layout.limits.vocab_size), dtype=torch.float32)
        logits: Tensor = self._lm_head(hidden)
        return logits.float()
