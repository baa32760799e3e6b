from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.core.sampling import SamplingParams
from outrider.decoding import truncation
from outrider.decoding.truncation import largest_values, truncate_


def kept(rows: Tensor, params: Sequence[SamplingParams]) -> list[list[int]]:
    """Ids that survive in each row, after the row's maximum was moved to 0."""
    law = rows - rows.amax(1, keepdim=True)
    truncate_(law, params)
    return [(row > -torch.inf).nonzero().squeeze(1).tolist() for row in law]


def by_full_sort(row: Tensor, sampling: SamplingParams) -> list[int]:
    """The same cut from one stable sort of the whole row."""
    values, ids = (row - row.max()).sort(descending=True, stable=True)
    weights = values.double().exp()
    if sampling.top_k:
        values, ids, weights = values[: sampling.top_k], ids[: sampling.top_k], weights[: sampling.top_k]
    if sampling.top_p < 1:
        before = weights.cumsum(0) - weights
        inside = before < sampling.top_p * weights.sum()
        inside[0] = True
        ids, weights = ids[inside], weights[inside]
    inside = weights >= sampling.min_p * (1 - 1e-12)
    return sorted(ids[inside & (weights > 0)].tolist())


@st.composite
def rows_and_params(draw: st.DrawFn) -> tuple[Tensor, list[SamplingParams]]:
    """Coarse logits, so that ties are everywhere; some rows flat, some peaked."""
    vocab = draw(st.sampled_from([1, 2, 5, 64, 65, 300, 2048, 4099]))
    num_rows = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.0, 0.4, 1.0, 3.0, 9.0]))
    rows = (torch.randn(num_rows, vocab, generator=generator) * scale * 4).round() / 4
    params = [
        SamplingParams(
            top_k=draw(st.sampled_from([0, 1, 2, 20, 95, 96, 97, 1000, 10_000])),
            # Powers of two in odd company, so that a sum never falls exactly on a goal by rounding alone.
            top_p=draw(st.sampled_from([1.0, 0.999, 0.951, 0.5003, 0.1, 1e-6])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.013, 0.31, 1.0])),
        )
        for _ in range(num_rows)
    ]
    return rows, params


@settings(deadline=None, max_examples=150, derandomize=True)
@given(rows_and_params())
def test_cut_equals_a_full_sort(case: tuple[Tensor, list[SamplingParams]]) -> None:
    rows, params = case
    assert kept(rows, params) == [by_full_sort(row, one) for row, one in zip(rows, params, strict=True)]


@pytest.mark.parametrize("scale", [0.1, 1.0, 2.5, 4.0])
def test_a_nucleus_of_any_size_is_exact(scale: float) -> None:
    """Flat to peaked rows: each depth of the search, and the whole vocabulary, decides some of them."""
    rows = scale * torch.randn(2, 6000, generator=torch.Generator().manual_seed(1))
    sizes = list[int]()
    for top_p in (0.3, 0.9, 0.95, 0.9999):
        sampling = SamplingParams(top_p=top_p)
        expected = [by_full_sort(row, sampling) for row in rows]
        assert kept(rows, [sampling, sampling]) == expected
        sizes += map(len, expected)
    smallest, *_ = truncation._NUCLEUS_DEPTHS
    assert max(sizes) > smallest


def test_ties_at_the_cut_keep_the_lower_ids() -> None:
    row = torch.tensor([[0.0, 2.0, 1.0, 1.0, 3.0, 1.0]])
    assert kept(row, [SamplingParams(top_k=3)]) == [[1, 2, 4]]
    assert kept(row, [SamplingParams(top_k=4)]) == [[1, 2, 3, 4]]
    flat = torch.zeros(1, 8)
    assert kept(flat, [SamplingParams(top_p=0.5)]) == [[0, 1, 2, 3]]
    assert kept(flat, [SamplingParams(top_p=0.51)]) == [[0, 1, 2, 3, 4]]
    assert kept(torch.zeros(1, 1000), [SamplingParams(top_p=0.25)]) == [list(range(250))]


def test_min_p_keeps_all_that_tie_with_the_best() -> None:
    row = torch.tensor([[0.0, 2.0, 2.0, -1.0]])
    assert kept(row, [SamplingParams(min_p=1.0)]) == [[1, 2]]
    assert kept(row, [SamplingParams(min_p=1.0, top_k=1)]) == [[1]]
    assert kept(row, [SamplingParams(min_p=0.1)]) == [[0, 1, 2]]


def test_top_p_takes_the_nucleus_of_what_top_k_left() -> None:
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept(row, [SamplingParams(top_p=0.5)]) == [[0, 1]]
    assert kept(row, [SamplingParams(top_p=0.5, top_k=2)]) == [[0]]  # 0.4 of 0.7 reaches a half


def test_removed_tokens_stay_removed() -> None:
    row = torch.tensor([[1.0, -torch.inf, 0.0, -torch.inf]])
    assert kept(row, [SamplingParams(top_k=3)]) == [[0, 2]]
    assert kept(row, [SamplingParams(top_p=0.999)]) == [[0, 2]]


@pytest.mark.parametrize("count", [1, 3, 50, 96])
def test_largest_values_equal_topk(count: int) -> None:
    rows = torch.randn(3, 49_155, generator=torch.Generator().manual_seed(0))
    rows[1] = rows[1].sort().values  # the best all at one end, partly behind the last whole tile
    assert torch.equal(largest_values(rows, count), rows.topk(count, dim=1).values)
