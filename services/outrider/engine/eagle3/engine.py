"""The head as a model engine: paged KV of one layer, and a pool of what the next row reads.

The row at position p reads its second input from slot p - 1 of that pool. The target's features are
written there as they arrive; behind them, the last row of a slice leaves its own output for the row
that follows it. Row 0 has no second input and therefore no KV: it is not computed, its slot is
hidden from attention, and its logits are all alike.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.core.errors import EngineUnavailable
from outrider.decoding.transfer import device_tensor
from outrider.engine.attention import KVPool, paged_attention
from outrider.engine.base import EngineLimits, ForwardBatch, ForwardSlice
from outrider.engine.eagle3.capture import slots_of
from outrider.engine.eagle3.packed import PackedHead
from outrider.engine.forward_threads import ForwardThreads
from outrider.engine.ragged import RaggedBatch, RowLayout, check_batch, ragged_batch

__all__ = ["Eagle3Engine"]


class Eagle3Engine:
    """Implements `ModelEngine` and `engine.features.FeatureSink`."""

    def __init__(
        self,
        head: PackedHead,
        rotary: LlamaRotaryEmbedding,
        limits: EngineLimits,
        threads: ForwardThreads | None = None,
    ) -> None:
        """Take the head over and allocate its pools. `threads` as in `ModelRunner`."""
        self._threads = threads
        shape = head.shape
        self._limits = limits
        self._head = head
        self._rotary = rotary
        self._closed = False
        self._layout = RowLayout(
            limits=limits,
            shared_heads=shape.heads // shape.kv_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=head.dtype,
            device=head.device,
        )
        self._kv = KVPool.allocate(
            num_layers=1,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=head.dtype,
            device=head.device,
            joined=True,
        )
        slots = limits.num_blocks * limits.block_size
        self._inputs = torch.zeros(slots, shape.hidden_size, dtype=head.dtype, device=head.device)

    @property
    def limits(self) -> EngineLimits:
        """What this engine can hold."""
        return self._limits

    @property
    def feature_row_bytes(self) -> int:
        """Bytes of one packed row: bfloat16 [hidden]."""
        return 2 * self._head.shape.hidden_size

    @torch.inference_mode()
    def write_features(self, block_table: Sequence[int], first_position: int, payload: bytes) -> None:
        """See `FeatureSink.write_features`."""
        count, rest = divmod(len(payload), self.feature_row_bytes)
        if rest or not count:
            raise ValueError(f"{len(payload)} bytes are no whole rows of {self.feature_row_bytes}")
        slots = slots_of(block_table, first_position, first_position + count, self._limits.block_size)
        rows = torch.frombuffer(bytearray(payload), dtype=torch.bfloat16).view(count, -1)
        self._inputs.index_copy_(0, self._index(slots), rows.to(self._inputs.device, self._inputs.dtype))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the rows; logits [sum of num_logits, vocab_size], -inf for ids that cannot be drafted.

        Raises as `ModelEngine.forward`.
        """
        self._check_open()
        if self._threads is not None:
            self._threads.claim()
        check_batch(batch, self._limits)
        kept = tuple(_without_row_0(one) for one in batch.slices)
        computed = ForwardBatch(slices=tuple(one for one in kept if one.token_ids))
        logits = self._run(computed) if computed.slices else self._no_logits(0)
        if all(one.num_logits == after.num_logits for one, after in zip(batch.slices, kept, strict=True)):
            return logits
        parts, at = [], 0
        for one, after in zip(batch.slices, kept, strict=True):
            parts += [self._no_logits(one.num_logits - after.num_logits), logits[at : at + after.num_logits]]
            at += after.num_logits
        return torch.cat(parts)

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV and inputs of whole blocks. Raises as `ModelEngine.copy_blocks`."""
        self._check_open()
        last = self._limits.num_blocks - 1
        if not all(0 <= block <= last for pair in pairs for block in pair):
            raise ValueError(f"block id outside 0..{last}")
        self._kv.copy_blocks(pairs)
        blocks = self._inputs.unflatten(0, (-1, self._limits.block_size))
        for source, destination in pairs:
            blocks[destination].copy_(blocks[source])

    def close(self) -> None:
        """Refuse further forwards. Closing again changes nothing."""
        self._closed = True

    def _run(self, batch: ForwardBatch) -> Tensor:
        head, size = self._head, self._limits.block_size
        ragged = ragged_batch(batch, self._layout)
        _hide_slot_0(ragged)
        before = [slot for one in batch.slices for slot in _slots_before(one, size)]
        hidden = self._inputs.index_select(0, self._index(before))  # [total, hidden]
        query, key, value = head.project(head.embed(ragged.input_ids), hidden)
        # Only differences of positions count, so rows may keep those of their tokens.
        cos, sin = self._rotary(hidden, ragged.position_ids.unsqueeze(0))
        query, key = head.rotate(query, key, cos.squeeze(0), sin.squeeze(0))
        attended = paged_attention(query, key, value, scaling=head.scaling, ragged=ragged, kv=self._kv.layers[0])
        output = head.finish(hidden, attended)
        self._leave_outputs(batch, ragged, output)
        if not len(ragged.logit_rows):
            return self._no_logits(0)
        return head.logits(output.index_select(0, ragged.logit_rows))

    def _leave_outputs(self, batch: ForwardBatch, ragged: RaggedBatch, output: Tensor) -> None:
        """What the last row of each drafting slice gave is what the next row reads.

        A slice without logits is prefill: the features behind its rows are here or will come, and
        must not be overwritten.
        """
        rows, end = [], 0
        for one in batch.slices:
            end += len(one.token_ids)
            if one.num_logits:
                rows.append(end - 1)
        if rows:
            index = self._index(rows)
            self._inputs.index_copy_(0, ragged.slots.index_select(0, index), output.index_select(0, index))

    def _no_logits(self, count: int) -> Tensor:
        return torch.zeros(count, self._limits.vocab_size, device=self._head.device)

    def _index(self, values: Sequence[int]) -> Tensor:
        return device_tensor(list(values), dtype=torch.long, device=self._head.device)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineUnavailable("the engine was closed")


def _without_row_0(one: ForwardSlice) -> ForwardSlice:
    if one.start > 0:
        return one
    tokens = one.token_ids[1:]
    return ForwardSlice(
        token_ids=tokens, start=1, block_table=one.block_table, num_logits=min(one.num_logits, len(tokens))
    )


def _slots_before(one: ForwardSlice, block_size: int) -> list[int]:
    """Slot of the position before each row."""
    return slots_of(one.block_table, one.start - 1, one.start - 1 + len(one.token_ids), block_size)


def _hide_slot_0(ragged: RaggedBatch) -> None:
    """No row sees position 0, which is not one of the head's."""
    for group in ragged.groups:
        group.mask[..., 0] = float("-inf")
