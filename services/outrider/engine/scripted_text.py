"""Text for the scripted engine: one character per token, so that a test reads ids off the text."""

from collections.abc import Sequence

from outrider.core.generation import ChatMessage
from outrider.engine.vocabulary import Vocabulary

__all__ = ["ScriptedTokenizer"]

_FIRST_PRINTABLE, _NUM_PRINTABLE = 32, 95
_FURTHER = 0x4E00 - _NUM_PRINTABLE  # a long run of assigned characters without case or marks


class ScriptedTokenizer:
    """Token t is the printable ASCII character 32 + t; further ids are CJK ideographs. No end-of-text.

    Implements `router.codec.TextCodec`. Worked example: "HI" is [40, 41].
    """

    def __init__(self, vocab_size: int) -> None:
        self._characters = tuple(
            chr(t + (_FIRST_PRINTABLE if t < _NUM_PRINTABLE else _FURTHER)) for t in range(vocab_size)
        )
        self._ids = {character: token_id for token_id, character in enumerate(self._characters)}

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return len(self._characters)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """None: texts end at max_tokens."""
        return ()

    @property
    def vocabulary(self) -> Vocabulary:
        """The characters in id order."""
        return Vocabulary(tokens=self._characters)

    def fingerprint(self) -> bytes:
        """Digest of the vocabulary."""
        return self.vocabulary.fingerprint()

    def encode(self, text: str) -> list[int]:
        """One id per character; characters outside the vocabulary wrap around into it."""
        return [self._ids.get(character, ord(character) % self.vocab_size) for character in text]

    def encode_chat(self, messages: Sequence[ChatMessage], *, continue_final_message: bool) -> list[int]:
        """Roles and contents as lines; an open assistant line at the end unless the last one goes on."""
        lines = [f"{one.role}:{one.content}" for one in messages]
        return self.encode("\n".join(lines if continue_final_message else [*lines, "assistant:"]))

    def token_bytes(self, token_id: int) -> bytes:
        """The character, in UTF-8."""
        return self._characters[token_id].encode()

    def detokenizer(self, *, context: Sequence[int], skip_special_tokens: bool) -> "_Detokenizer":
        """Make a detokenizer; neither argument matters here."""
        return _Detokenizer(self._characters)


class _Detokenizer:
    def __init__(self, characters: Sequence[str]) -> None:
        self._characters = characters

    def feed(self, token_id: int) -> str:
        """The character of this token."""
        return self._characters[token_id]

    def flush(self) -> str:
        """Nothing is ever incomplete."""
        return ""
