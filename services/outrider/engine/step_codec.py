"""One step's command from rank 0 to the other ranks, as one list of integers.

    stop      [0]
    forward   [1, slices, then per slice: start, num_logits, rows, blocks, token ids …, block ids …]

Integers, because a tensor travels through the group in one broadcast, without pickling.
"""

from collections.abc import Sequence

from outrider.core.errors import ProtocolError
from outrider.engine.base import ForwardBatch, ForwardSlice

__all__ = ["decode_step", "encode_step", "encode_stop"]

_STOP, _FORWARD = 0, 1
_HEADER = 2
_SLICE_HEADER = 4


def encode_stop() -> list[int]:
    """The command that ends the other ranks' loops."""
    return [_STOP]


def encode_step(batch: ForwardBatch, block_size: int) -> list[int]:
    """The command to run a batch. Blocks beyond a slice's last row are left out."""
    values = [_FORWARD, len(batch.slices)]
    for one in batch.slices:
        used = -(-(one.start + len(one.token_ids)) // block_size)
        blocks = one.block_table[:used]
        values += (one.start, one.num_logits, len(one.token_ids), len(blocks))
        values += one.token_ids
        values += blocks
    return values


def decode_step(values: Sequence[int]) -> ForwardBatch | None:
    """The batch to run, or None for stop. Raises `ProtocolError` if the list is neither."""
    if not values or values[0] not in (_STOP, _FORWARD):
        raise ProtocolError(f"unknown step command {list(values[:1])}")
    if values[0] == _STOP:
        return None
    slices, at = [], _HEADER
    for _ in range(values[1]):
        start, num_logits, rows, blocks = values[at : at + _SLICE_HEADER]
        tokens_at = at + _SLICE_HEADER
        blocks_at = tokens_at + rows
        at = blocks_at + blocks
        slices.append(
            ForwardSlice(
                token_ids=values[tokens_at:blocks_at],
                start=start,
                block_table=values[blocks_at:at],
                num_logits=num_logits,
            )
        )
    if at != len(values):
        raise ProtocolError(f"step command of {len(values)} integers describes {at}")
    return ForwardBatch(slices=tuple(slices))
