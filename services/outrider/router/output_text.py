"""The text of one choice as its tokens arrive: detokenized, with possible stop strings held back."""

from collections.abc import Sequence

from outrider.core.request import StopConditions
from outrider.core.text import StopStringFinder
from outrider.router.codec import TextCodec

__all__ = ["CONTEXT_TOKENS", "OutputText"]

CONTEXT_TOKENS = 64
"""Prompt tokens that a detokenizer gets as context: how a token reads depends on few before it."""


class OutputText:
    """Turns output tokens into text that is safe to show.

    The engine alone decides where a sequence ends. A stop string found here is only held back
    until the engine's word arrives: it may have ended the sequence for another reason, or not at
    all (below `min_tokens`). What is shown depends on the tokens alone, not on how they were split
    into deltas or streams; so a resumed stream continues the text exactly where the first one
    broke, held-back text included.
    """

    def __init__(
        self, codec: TextCodec, *, prompt_token_ids: Sequence[int], stop: StopConditions, include_stop_str: bool
    ) -> None:
        self._stop = stop
        self._include = include_stop_str
        self._detokenizer = codec.detokenizer(
            context=prompt_token_ids[-CONTEXT_TOKENS:], skip_special_tokens=stop.skip_special_tokens
        )
        self._finder = StopStringFinder(stop.strings, include=True)
        self._unshown = ""
        self._found: int | None = None
        self.num_tokens = 0
        """Output tokens fed so far, resumed ones included."""

    @property
    def found_stop_string(self) -> str | None:
        """The stop string that the last token completed; None below `min_tokens`."""
        return None if self._found is None else self._stop.strings[self._found]

    def feed(self, token_id: int) -> str:
        """Take the next output token; return the text that is now certain to be shown."""
        self.num_tokens += 1
        shown = self._release(len(self._unshown)) if self._found is not None else ""
        self._found = None  # the engine went on behind it, so it ended nothing
        piece = self._detokenizer.feed(token_id)
        self._unshown += piece
        scanned = self._finder.feed(piece)
        if scanned.stop_string_index is None:
            return shown + self._release(len(scanned.text))
        if self.num_tokens < self._stop.min_tokens:
            return shown + self._release(len(self._unshown))
        self._found = scanned.stop_string_index
        return shown + self._release(len(scanned.text) - len(self._stop.strings[scanned.stop_string_index]))

    def finish(self, stop_string_index: int | None) -> str:
        """Return what is left to show. With a stop string the text is cut there, else it is flushed."""
        if stop_string_index is None:
            return self._release(len(self._unshown)) + self._detokenizer.flush()
        string = self._stop.strings[stop_string_index]
        at = self._unshown.find(string)
        if at < 0:  # already cut, or nothing that belongs to the text
            return ""
        return self._unshown[: at + len(string) if self._include else at]

    def _release(self, length: int) -> str:
        shown, self._unshown = self._unshown[:length], self._unshown[length:]
        return shown
