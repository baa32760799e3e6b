"""The bytes of single tokens: together they are the text, whatever the vocabulary."""

from pathlib import Path

import pytest
from tests.unit.engine.byte_tokenizer import save_byte_tokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import BPE

from outrider.engine import tokenizer as engine_tokenizer
from outrider.engine.token_bytes import TokenByteTable


@pytest.mark.parametrize("text", ["hello world", "مرحبا", "👩‍👩‍👧‍👦 🇳🇴", "a\n\tb", "\x00\x7f\xa0\xad"])
def test_the_bytes_of_a_text_are_those_of_its_tokens(tmp_path: Path, text: str) -> None:
    save_byte_tokenizer(tmp_path)
    made = engine_tokenizer.Tokenizer(tmp_path)
    assert b"".join(made.token_bytes(one) for one in made.encode(text)) == text.encode()


def test_special_tokens_are_their_names(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    made = engine_tokenizer.Tokenizer(tmp_path)
    assert made.token_bytes(made.eos_token_ids[-1]) == b"<|end|>"
    assert made.token_bytes(made.vocab_size + 5) == b""


def test_sentencepiece_vocabularies() -> None:
    backend = Tokenizer(BPE(vocab={"▁hello": 0, "<0xE2>": 1, "x": 2, "<0x": 3}, merges=[], byte_fallback=True))
    backend.decoder = Decoders([Replace("▁", " "), ByteFallback(), Fuse()])
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    table = TokenByteTable(backend)
    assert [table.token_bytes(one) for one in range(5)] == [b" hello", b"\xe2", b"x", b"<0x", b"<s>"]
