"""Text to ids and back: characters are never split, and two vocabularies are told apart."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.byte_tokenizer import MERGES, save_byte_tokenizer

from outrider.core.errors import ConfigError
from outrider.core.generation import ChatMessage
from outrider.engine.tokenizer import Tokenizer
from outrider.engine.vocabulary import Vocabulary

TEXTS = {
    "ascii": "hello world, hello 1234",
    "arabic": "مرحبا بالعالم، كيف حالك؟",
    "combining": "e\u0301a\u0308o\u0327 n\u0303",
    "emoji": "👩‍👩‍👧‍👦 and 🇳🇴 and 👍🏽!",
    "cjk": "你好，世界。",
    "newlines": "a\n\n  b\t c ",
    "replacement": "a real \ufffd stays",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder)
    return Tokenizer(folder)


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, context: list[int], skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(context=context, skip_special_tokens=skip)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", TEXTS)
def test_pieces_join_to_the_text_and_split_no_character(tokenizer: Tokenizer, name: str) -> None:
    ids = tokenizer.encode(TEXTS[name])
    pieces = pieces_of(tokenizer, ids, context=[])
    assert "".join(pieces) == TEXTS[name]
    if name != "replacement":
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_appears_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a👍b")
    assert pieces_of(tokenizer, ids, context=[]) == ["a", "", "", "", "👍", "b", ""]


@pytest.mark.parametrize("split", range(1, 12))
def test_the_context_is_not_repeated_even_when_it_ends_inside_a_character(tokenizer: Tokenizer, split: int) -> None:
    ids = tokenizer.encode("x👍👍y")
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    complete = tokenizer.decode(ids[:split], skip_special_tokens=True).rstrip("\ufffd")
    if split < len(ids):
        assert "".join(pieces_of(tokenizer, ids[split:], context=ids[:split])) == whole[len(complete) :]


def test_an_unfinished_character_is_flushed_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok👍")[:-1]
    detokenizer = tokenizer.detokenizer(context=[], skip_special_tokens=True)
    assert "".join(detokenizer.feed(token_id) for token_id in ids) == "ok"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_tokens_are_shown_or_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello<|end|> w")
    assert "".join(pieces_of(tokenizer, ids, context=[])) == "hello w"
    assert "".join(pieces_of(tokenizer, ids, context=[], skip=False)) == "hello<|end|> w"


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 263), max_size=120), split=st.integers(0, 40))
def test_any_bytes_come_out_as_when_decoded_at_once(tokenizer: Tokenizer, ids: list[int], split: int) -> None:
    context, output = ids[:split], ids[split:]
    before = tokenizer.decode(context, skip_special_tokens=True)
    whole = tokenizer.decode(ids, skip_special_tokens=True)

    text = "".join(pieces_of(tokenizer, output, context=context))

    # The context may end inside a character, which then belongs to the output.
    assert whole.endswith(text)
    assert len(whole) - len(text) in range(len(before.rstrip("\ufffd")), len(before) + 1)


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("2048")) == 4


def test_chat_opens_or_continues_a_turn(tokenizer: Tokenizer) -> None:
    turn = ChatMessage(role="user", content="hello")
    opened = tokenizer.encode_chat([turn], continue_final_message=False)
    assert tokenizer.decode(opened, skip_special_tokens=False) == "<|start|>user:hello<|end|><|start|>assistant:"

    begun = ChatMessage(role="assistant", content="hell")
    continued = tokenizer.encode_chat([turn, begun], continue_final_message=True)
    expected = "<|start|>user:hello<|end|><|start|>assistant:hell"
    assert tokenizer.decode(continued, skip_special_tokens=False) == expected


def test_a_refused_conversation_is_a_value_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no villains"):
        tokenizer.encode_chat([ChatMessage(role="villain", content="ha")], continue_final_message=False)


def test_ends_of_text_come_from_model_and_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (0, 263)
    assert tokenizer.vocab_size == 264


def test_equal_vocabularies_have_equal_fingerprints(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    twin = Tokenizer(tmp_path)
    assert twin.fingerprint() == tokenizer.fingerprint()
    assert twin.vocabulary.first_difference(tokenizer.vocabulary) is None


def test_a_different_token_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path, merges=[*MERGES[:4], ("Ġ", "h"), MERGES[5]])
    other = Tokenizer(tmp_path)
    assert other.fingerprint() != tokenizer.fingerprint()
    assert tokenizer.vocabulary.first_difference(other.vocabulary) == "token id 260 is 'Ġw' here and 'Ġh' there"


def test_padding_is_no_difference_but_more_tokens_are() -> None:
    plain = Vocabulary(tokens=("a", "b"))
    padded = Vocabulary(tokens=("a", "b", None, None))
    longer = Vocabulary(tokens=("a", "b", "c"))
    assert plain.fingerprint() == padded.fingerprint()
    assert plain.first_difference(padded) is None
    assert plain.fingerprint() != longer.fingerprint()
    assert plain.first_difference(longer) == "token id 2 is not assigned here and 'c' there"


def test_special_tokens_and_merges_are_compared(tokenizer: Tokenizer, tmp_path: Path) -> None:
    words = tokenizer.vocabulary
    assert words.special_ids == {262, 263}
    assert words.merges[:2] == ("h e", "l l")
    assert words.first_difference(words) is None
    ordinary = replace(words, special_ids=frozenset({263}))
    assert words.first_difference(ordinary) == "token id 262, '<|start|>', is special here and ordinary there"
    assert ordinary.first_difference(words) == "token id 262, '<|start|>', is ordinary here and special there"
    swapped = replace(words, merges=(words.merges[1], words.merges[0], *words.merges[2:]))
    assert words.first_difference(swapped) == "merge 0 is 'h e' here and 'l l' there"
    shorter = replace(words, merges=words.merges[:-1])
    assert words.first_difference(shorter) == "merge 5 is 'Ð °' here and not assigned there"


def test_tokens_do_not_run_together_in_the_fingerprint() -> None:
    assert Vocabulary(tokens=("ab", "c")).fingerprint() != Vocabulary(tokens=("a", "bc")).fingerprint()


def test_a_folder_without_a_tokenizer_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer: cannot load"):
        Tokenizer(tmp_path)


def test_the_tokenizer_loads_no_torch(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    code = (
        "import sys; from pathlib import Path; from outrider.engine.tokenizer import Tokenizer;"
        "Tokenizer(Path(sys.argv[1])).encode('hello'); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
