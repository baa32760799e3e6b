"""The command that drives the other ranks says exactly what rank 0 runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import ProtocolError
from outrider.engine.base import ForwardBatch, ForwardSlice
from outrider.engine.step_codec import BlockCopies, Stop, decode_command, encode_copies, encode_step, encode_stop

BLOCK_SIZE = 4


@st.composite
def slices(draw: st.DrawFn) -> ForwardSlice:
    token_ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9))
    start = draw(st.integers(0, 20))
    used = -(-(start + len(token_ids)) // BLOCK_SIZE)
    table = draw(st.lists(st.integers(0, 2**31 - 1), min_size=used, max_size=used))
    num_logits = draw(st.integers(0, len(token_ids)))
    return ForwardSlice(token_ids=token_ids, start=start, block_table=table, num_logits=num_logits)


@given(st.lists(slices(), max_size=4))
def test_a_batch_survives(several: list[ForwardSlice]) -> None:
    batch = ForwardBatch(slices=tuple(several))
    assert decode_command(encode_step(batch, BLOCK_SIZE)) == batch


def test_blocks_that_no_row_reaches_stay_at_home() -> None:
    one = ForwardSlice(token_ids=[7, 8], start=3, block_table=[5, 6, 9, 9], num_logits=1)
    batch = decode_command(encode_step(ForwardBatch(slices=(one,)), BLOCK_SIZE))
    assert isinstance(batch, ForwardBatch)
    assert batch.slices[0].block_table == [5, 6]


def test_stop_survives() -> None:
    assert decode_command(encode_stop()) == Stop()


@pytest.mark.parametrize("pairs", [[], [(3, 5)], [(3, 5), (5, 7)]])
def test_copies_survive(pairs: list[tuple[int, int]]) -> None:
    assert decode_command(encode_copies(pairs)) == BlockCopies(pairs=tuple(pairs))


@pytest.mark.parametrize("values", [[], [3], [0, 0], [2, 4], [1, 1, 0, 0, 1, 1, 5], [1, 0, 9]])
def test_anything_else_is_refused(values: list[int]) -> None:
    with pytest.raises(ProtocolError):
        decode_command(values)
