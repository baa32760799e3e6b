"""Sends a draft the features that it reads: of every committed row, in order, from the engine's store."""

from collections.abc import Container, Iterable

from outrider.core.link import Features
from outrider.engine.features import FeatureSource
from outrider.engine.sequence_kv import KVCache
from outrider.target.held_sequence import HeldSequence, Phase

__all__ = ["FeatureFeed"]

_MAX_ROWS_PER_STEP = 2048
"""Rows that catch up in one step, over all sequences: a long prompt must not hold a step up. At 16 KB a
row (a 70B) that is 32 MB, more than a step's prefill gives."""


class FeatureFeed:
    """Knows what can be sent; what has been sent stands with each held sequence.

    Whatever KV a sequence has, its features are stored: rows found in the prefix cache, and all of them
    anew when the draft has lost them. While a sequence has no KV (it waits, or was preempted) there is
    nothing to send, and its draft simply waits.
    """

    def __init__(self, source: FeatureSource, kv: KVCache) -> None:
        self._source = source
        self._kv = kv

    def events(self, held: Iterable[HeldSequence], *, going: Container[int]) -> list[Features]:
        """What the draft lacks and can have now; counts it as sent.

        For sequences that it still opens, and for those that it holds and shall draft for (`going`, by
        handle). The others keep theirs until their turn: while speculation is off, nothing is sent.
        """
        events = []
        spare = _MAX_ROWS_PER_STEP
        for one in held:
            handle = one.sequence.handle
            wanted = one.phase is Phase.OPENING or (one.phase is Phase.READY and handle in going)
            if not wanted or handle not in self._kv:
                continue
            start = one.features_sent
            end = min(self._kv.computed_len(handle), start + spare)
            if start < end:
                payload = self._source.read(self._kv.block_table(handle), start, end)
                events.append(Features(handle=handle, first_position=start, num_rows=end - start, payload=payload))
                one.features_sent = end
                spare -= end - start
        return events

    @staticmethod
    def is_fed(held: HeldSequence) -> bool:
        """Whether the draft has all that it needs to continue the text: every row but the last token's."""
        return held.features_sent >= held.sequence.committed_len - 1
