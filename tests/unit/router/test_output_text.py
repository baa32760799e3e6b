"""Text from tokens: characters, stop strings, resumption."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router.byte_codec import EOS, STOP_WORD, ByteCodec, ids

from outrider.core.request import StopConditions
from outrider.router.output_text import OutputText


def output(*strings: str, include: bool = False, **stop: Any) -> OutputText:
    conditions = StopConditions(max_tokens=100, strings=strings, **stop)
    return OutputText(ByteCodec(), prompt_token_ids=ids("hi"), stop=conditions, include_stop_str=include)


def feed(text: OutputText, *token_ids: int) -> list[str]:
    return [text.feed(one) for one in token_ids]


def test_character_is_shown_when_its_last_byte_arrives() -> None:
    assert feed(output(), *ids("é€🙂")) == ["", "é", "", "", "€", "", "", "", "🙂"]


def test_incomplete_character_is_flushed_as_replacement() -> None:
    text = output()
    assert feed(text, *ids("a€")[:3]) == ["a", "", ""]
    assert text.finish(None) == "�"


def test_possible_stop_string_is_held_back_until_it_is_none() -> None:
    text = output("END")
    assert feed(text, *ids("xENy")) == ["x", "", "", "ENy"]


def test_held_text_is_flushed_at_the_end() -> None:
    text = output("END")
    assert feed(text, *ids("aEN")) == ["a", "", ""]
    assert text.finish(None) == "EN"


def test_text_is_cut_before_the_stop_string() -> None:
    text = output("END")
    assert feed(text, *ids("aEND")) == ["a", "", "", ""]
    assert text.found_stop_string == "END"
    assert text.finish(0) == ""


def test_included_stop_string_is_shown_at_the_end() -> None:
    text = output("END", include=True)
    assert feed(text, *ids("aEND")) == ["a", "", "", ""]
    assert text.finish(0) == "END"


@pytest.mark.parametrize(("include", "rest"), [(False, ""), (True, "STOP")])
def test_token_longer_than_the_stop_string_is_cut_inside(include: bool, rest: str) -> None:
    text = output("STOP", include=include)
    assert text.feed(STOP_WORD) == "a "
    assert text.finish(0) == rest


def test_earliest_stop_string_wins_and_the_first_listed_at_one_place() -> None:
    text = output("OP", "STO", "STOP")
    assert text.feed(STOP_WORD) == "a "
    assert text.found_stop_string == "STO"


def test_engine_that_ended_at_a_stop_token_gets_the_whole_text() -> None:
    text = output("<eos>", skip_special_tokens=False)
    assert feed(text, *ids("a"), EOS) == ["a", ""]
    assert text.finish(None) == "<eos>"


def test_special_tokens_have_no_text_unless_shown() -> None:
    assert feed(output(), 97, EOS, 98) == ["a", "", "b"]


def test_engine_that_goes_on_behind_a_stop_string_gets_the_whole_text() -> None:
    text = output("STOP")
    assert feed(text, STOP_WORD, *ids("c")) == ["a ", "STOP bc"]


def test_stop_string_below_min_tokens_is_text() -> None:
    text = output("END", min_tokens=4)
    assert feed(text, *ids("ENDx")) == ["", "", "END", "x"]
    assert text.found_stop_string is None


def test_stop_string_that_begins_below_min_tokens_counts() -> None:
    text = output("END", min_tokens=3)
    assert feed(text, *ids("END")) == ["", "", ""]
    assert text.finish(0) == ""


def test_unseen_stop_string_shows_nothing_more() -> None:
    text = output("END", "other")
    feed(text, *ids("aEN"))
    assert text.finish(1) == ""


@given(st.text(alphabet="abé🙂EN", max_size=20), st.data())
def test_resumed_stream_continues_the_text_exactly(whole: str, data: st.DataObject) -> None:
    tokens = ids(whole)
    cut = data.draw(st.integers(0, len(tokens)))
    strings = ("EEb", "bN", "🙂é")

    first, second = output(*strings), output(*strings)
    before = "".join(feed(first, *tokens[:cut]))
    feed(second, *tokens[:cut])  # the resumed tokens: fed, not shown
    after = "".join(feed(second, *tokens[cut:])) + second.finish(None)
    assert before + after == whole
