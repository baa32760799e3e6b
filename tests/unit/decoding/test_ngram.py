import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.ngram import NgramIndex


def by_scanning(tokens: list[int], min_n: int, max_n: int, k: int) -> tuple[int, ...]:
    for n in range(min(max_n, len(tokens)), min_n - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                text = list(tokens)
                for index in range(start + n, start + n + k):
                    text.append(text[index])
                return tuple(text[len(tokens) :])
    return ()


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=8),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 9),
)
def test_proposes_what_a_scan_of_the_text_finds(chunks: list[list[int]], min_n: int, more: int, k: int) -> None:
    index, text = NgramIndex(min_n=min_n, max_n=min_n + more), list[int]()
    for chunk in chunks:
        index.extend(chunk)
        text += chunk
        assert index.propose(k) == by_scanning(text, min_n, min_n + more, k)
    assert len(index) == len(text)


def test_longest_suffix_wins_over_a_more_recent_shorter_one() -> None:
    index = NgramIndex(min_n=1, max_n=3)
    index.extend([1, 2, 3, 7, 9, 3, 8, 1, 2, 3])
    assert index.propose(2) == (7, 9)


def test_most_recent_occurrence_wins() -> None:
    index = NgramIndex(min_n=2, max_n=2)
    index.extend([1, 2, 5, 1, 2, 6, 1, 2])
    assert index.propose(1) == (6,)


def test_a_loop_is_continued_past_the_end_of_the_text() -> None:
    index = NgramIndex(min_n=2, max_n=4)
    index.extend([4, 5, 6, 4, 5, 6, 4, 5])
    assert index.propose(7) == (6, 4, 5, 6, 4, 5, 6)


def test_nothing_is_proposed_without_a_match() -> None:
    index = NgramIndex(min_n=2, max_n=3)
    assert index.propose(4) == ()
    index.extend([1, 2, 3, 1])
    assert index.propose(4) == ()


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 2), (3, 2)])
def test_impossible_lengths_are_refused(min_n: int, max_n: int) -> None:
    with pytest.raises(ValueError, match="n-gram"):
        NgramIndex(min_n=min_n, max_n=max_n)
