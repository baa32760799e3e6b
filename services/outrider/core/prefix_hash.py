"""A 32-bit hash of a token prefix, kept per position so that both sides of a link can audit drift."""

import zlib
from collections.abc import Iterable

__all__ = ["PrefixHash"]


class PrefixHash:
    """CRC-32 over the little-endian ids of a growing, truncatable text."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._hashes = [0]
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._hashes) - 1

    @property
    def value(self) -> int:
        """Hash of the whole text, in [0, 2^32)."""
        return self._hashes[-1]

    def at(self, length: int) -> int:
        """Hash of the first `length` tokens. Raises `ValueError` outside [0, len]."""
        if not 0 <= length <= len(self):
            raise ValueError(f"no prefix of {length} tokens in a text of {len(self)}")
        return self._hashes[length]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens."""
        value = self._hashes[-1]
        for token_id in token_ids:
            value = zlib.crc32(token_id.to_bytes(4, "little"), value)
            self._hashes.append(value)

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        del self._hashes[length + 1 :]
