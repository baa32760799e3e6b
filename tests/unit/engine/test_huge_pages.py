"""Huge pages change where weights lie, never what they are."""

import torch

from outrider.engine.huge_pages import span_of, use_huge_pages
from outrider.engine.linear import PackedLinear, can_pack


def test_contents_and_addresses_stay() -> None:
    tensor = torch.arange(3 << 20, dtype=torch.int32)
    before = span_of(tensor)

    use_huge_pages([before])

    assert span_of(tensor) == before == (tensor.data_ptr(), 12 << 20)
    assert torch.equal(tensor, torch.arange(3 << 20, dtype=torch.int32))


def test_a_packed_weight_is_found_and_stays() -> None:
    assert can_pack(torch.device("cpu"), torch.float32)
    layer = PackedLinear(torch.randn(512, 512, generator=torch.Generator().manual_seed(1)), None)
    rows = torch.ones(2, 512)
    expected = layer(rows)
    address, length = span_of(layer.weight)

    use_huge_pages([(address, length)])

    assert address
    assert length >= 512 * 512 * 4
    assert torch.equal(layer(rows), expected)


def test_small_spans_and_memory_that_is_not_there_are_left_alone() -> None:
    small = torch.zeros(16)
    assert use_huge_pages([span_of(small)]) == 0
    assert use_huge_pages([(1 << 46, 4 << 20)]) == 0
    assert use_huge_pages([]) == 0
