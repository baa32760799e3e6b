"""A forked text reads like the list that it stands for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.forked_text import ForkedText

TOKENS = st.lists(st.integers(0, 9), max_size=8)
PLACES = st.none() | st.integers(-20, 20)


@given(base=TOKENS, own=TOKENS, more=TOKENS, data=st.data())
def test_reads_like_a_list(base: list[int], own: list[int], more: list[int], data: st.DataObject) -> None:
    shared = data.draw(st.integers(0, len(base)))
    text = ForkedText(base, shared, own)
    text.extend(more)
    base += [7, 8]  # the other text goes on by itself
    expected = [*base[:shared], *own, *more]
    assert list(text) == expected
    assert len(text) == len(expected)
    part = slice(data.draw(PLACES), data.draw(PLACES), data.draw(st.sampled_from([None, 1, 2, -1])))
    assert text[part] == expected[part]
    for place in range(-len(expected), len(expected)):
        assert text[place] == expected[place]


def test_an_index_beyond_the_end_is_an_error() -> None:
    text = ForkedText([1, 2, 3], 2, [4])
    with pytest.raises(IndexError):
        _ = text[3]


def test_a_slice_is_a_list_of_its_own() -> None:
    text = ForkedText([1, 2, 3], 3, [4])
    copy = text[:]
    text.extend([5])
    assert copy == [1, 2, 3, 4]
