"""The scripted tokenizer: one character per id, both ways."""

import pytest

from outrider.core.generation import ChatMessage
from outrider.engine.scripted_text import ScriptedTokenizer


def text_of(tokenizer: ScriptedTokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer(context=(), skip_special_tokens=True)
    return "".join(detokenizer.feed(one) for one in ids) + detokenizer.flush()


def test_the_example_of_the_docstring() -> None:
    assert ScriptedTokenizer(64).encode("HI") == [40, 41]


@pytest.mark.parametrize("vocab_size", [8, 64, 95, 96, 300])
def test_every_id_comes_back(vocab_size: int) -> None:
    tokenizer = ScriptedTokenizer(vocab_size)
    ids = list(range(vocab_size))
    assert tokenizer.encode(text_of(tokenizer, ids)) == ids


def test_foreign_characters_wrap_into_the_vocabulary() -> None:
    ids = ScriptedTokenizer(64).encode("añ\n☃")
    assert all(0 <= one < 64 for one in ids)
    assert len(ids) == 4


def test_a_chat_opens_an_assistant_turn_or_goes_on() -> None:
    tokenizer = ScriptedTokenizer(128)
    turns = [ChatMessage(role="user", content="A")]
    assert tokenizer.encode_chat(turns, continue_final_message=True) == tokenizer.encode("user:A")
    assert tokenizer.encode_chat(turns, continue_final_message=False) == tokenizer.encode("user:A\nassistant:")


def test_fingerprints_tell_sizes_apart() -> None:
    assert ScriptedTokenizer(64).fingerprint() == ScriptedTokenizer(64).fingerprint()
    assert ScriptedTokenizer(64).fingerprint() != ScriptedTokenizer(65).fingerprint()
