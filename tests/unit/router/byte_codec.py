"""A byte-level `TextCodec` whose ids one can write by hand: id = byte, then a few special tokens."""

from collections.abc import Sequence

from outrider.core.generation import ChatMessage

EOS = 256
BOT = 257
"""Begin of turn: special, no text unless special tokens are shown."""
STOP_WORD = 258
"""One ordinary token of several characters."""
VOCAB_SIZE = 259

_SPECIAL = {EOS: "<eos>", BOT: "<bot>"}


def ids(text: str) -> tuple[int, ...]:
    """One id per UTF-8 byte."""
    return tuple(text.encode())


class ByteDetokenizer:
    """Completes characters; skips or shows special tokens."""

    def __init__(self, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._skip = skip_special_tokens
        self._pending = b""
        for token_id in context[-3:]:
            self.feed(token_id)

    def feed(self, token_id: int) -> str:
        if token_id in _SPECIAL:
            return self.flush() + ("" if self._skip else _SPECIAL[token_id])
        if token_id == STOP_WORD:
            return self.flush() + "a STOP b"
        self._pending += bytes([token_id])
        try:
            text = self._pending.decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return self.flush()
            return ""
        self._pending = b""
        return text

    def flush(self) -> str:
        text, self._pending = self._pending.decode(errors="replace"), b""
        return text


class ByteCodec:
    """`core` never sees that it is a toy."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return _SPECIAL[token_id].encode() if token_id in _SPECIAL else bytes([token_id % 256])

    def encode_chat(self, messages: Sequence[ChatMessage], *, continue_final_message: bool) -> list[int]:
        if any(one.content == "refuse me" for one in messages):
            raise ValueError("the template refuses this conversation")
        turns = [token for one in messages for token in (BOT, *f"{one.role[0]}:{one.content}".encode())]
        return turns if continue_final_message else [*turns, BOT, *b"a:"]

    def detokenizer(self, *, context: Sequence[int], skip_special_tokens: bool) -> ByteDetokenizer:
        return ByteDetokenizer(context, skip_special_tokens)
