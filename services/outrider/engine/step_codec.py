"""One step's command from rank 0 to the other ranks, as one list of integers.

    stop      [0]
    forward   [1, slices, then per slice: start, num_logits, rows, blocks, token ids …, block ids …]
    copy      [2, then per pair: source block, destination block]

Integers, because a tensor travels through the group in one broadcast, without pickling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.errors import ProtocolError
from outrider.engine.base import ForwardBatch, ForwardSlice

__all__ = ["BlockCopies", "Stop", "decode_command", "encode_copies", "encode_step", "encode_stop"]

_STOP, _FORWARD, _COPY = 0, 1, 2
_HEADER = 2
_SLICE_HEADER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopies:
    """Copy whole KV blocks, (source, destination) in order."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the loop."""


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


def encode_copies(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The command to copy KV blocks."""
    return [_COPY, *(block for pair in pairs for block in pair)]


def decode_command(values: Sequence[int]) -> ForwardBatch | BlockCopies | Stop:
    """What rank 0 wants. Raises `ProtocolError` if the list is no command."""
    if values and values[0] == _FORWARD:
        return _decode_step(values)
    if values and values[0] == _COPY and len(values) % 2 == 1:
        return BlockCopies(pairs=tuple(zip(values[1::2], values[2::2], strict=True)))
    if list(values) == [_STOP]:
        return Stop()
    raise ProtocolError(f"unknown command {list(values[:2])} of {len(values)} integers")


def _decode_step(values: Sequence[int]) -> ForwardBatch:
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
