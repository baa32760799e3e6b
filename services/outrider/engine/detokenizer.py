"""Text from tokens, one at a time, without ever splitting a character."""

from collections.abc import Sequence
from typing import Any

__all__ = ["IncrementalDetokenizer"]

_REPLACEMENT = "\ufffd"
# An unfinished UTF-8 character shows as one to three replacement characters, by decoder.
_MAX_UNFINISHED = 3
# A window longer than this is cut down to its last tokens: a character takes four bytes at most,
# and how a token's leading space reads depends on whether anything stands before it.
_MAX_WINDOW = 32
_KEPT = 8


class IncrementalDetokenizer:
    """Implements `core.text.Detokenizer`. Holds the state of one sequence.

    How a token reads depends on the few before it (leading spaces, characters of several tokens).
    So a short window of tokens is decoded anew at each step, and what it adds is returned, except
    an unfinished character at its end. All pieces put together, `flush` included, are the text of
    decoding context and tokens at once, less the context's.
    """

    def __init__(self, backend: Any, *, context: Sequence[int], skip_special_tokens: bool) -> None:
        """`backend` is a `tokenizers.Tokenizer`; the text of `context` is not returned."""
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._window = list(context[-_MAX_WINDOW:])
        self._num_shown = _stable_length(self._decode(self._window))

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = _stable_length(text)
        piece = text[self._num_shown : stable]
        self._num_shown = max(self._num_shown, stable)
        if len(self._window) > _MAX_WINDOW:
            self._shorten()
        return piece

    def flush(self) -> str:
        """Return what is left at the end (an incomplete character, rendered as U+FFFD)."""
        text = self._decode(self._window)
        piece, self._num_shown = text[self._num_shown :], len(text)
        return piece

    def _shorten(self) -> None:
        kept = self._window[-_KEPT:]
        text = self._decode(kept)
        # Skipped special tokens alone are no context: the next token would read as the first.
        if text:
            self._window, self._num_shown = kept, _stable_length(text)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text


def _stable_length(text: str) -> int:
    """Length of `text` without what may be an unfinished character at its end."""
    unfinished = len(text) - len(text.rstrip(_REPLACEMENT))
    return len(text) - min(unfinished, _MAX_UNFINISHED)
