"""The bytes behind single tokens, which text alone does not show: a token may be part of a character."""

import json
from typing import Any

__all__ = ["TokenByteTable"]

_WORD_START = "▁"
_BYTE_PREFIX, _BYTE_SUFFIX, _BYTE_LEN = "<0x", ">", 6


class TokenByteTable:
    """Bytes by token id, for byte-level vocabularies (GPT-2's alphabet) and for SentencePiece's."""

    def __init__(self, backend: Any) -> None:
        """`backend` is a `tokenizers.Tokenizer`."""
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._alphabet = _byte_alphabet() if _is_byte_level(backend) else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an id without one."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        if self._alphabet is not None:
            alphabet = self._alphabet
            return b"".join(bytes([alphabet[one]]) if one in alphabet else one.encode() for one in token)
        if token.startswith(_BYTE_PREFIX) and token.endswith(_BYTE_SUFFIX) and len(token) == _BYTE_LEN:
            return bytes([int(token[len(_BYTE_PREFIX) : -1], 16)])
        return str(token).replace(_WORD_START, " ").encode()


def _is_byte_level(backend: Any) -> bool:
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    kinds = [decoder, *decoder.get("decoders", [])]
    return any(one.get("type") == "ByteLevel" for one in kinds)


def _byte_alphabet() -> dict[str, int]:
    """Which character stands for which byte: printable Latin-1 for itself, the rest from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
