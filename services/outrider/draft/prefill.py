"""Computes the KV of opened, repaired and long silent sequences, one bounded chunk at a time."""

from outrider.core.link import OpenAck, RefusalReason
from outrider.draft.counters import DraftCounters
from outrider.draft.link import Link
from outrider.draft.residents import Residents
from outrider.draft.sequence import DraftSequence, Stage
from outrider.engine.base import ForwardBatch, ForwardSlice, ModelEngine

__all__ = ["Prefiller"]


class Prefiller:
    """Prefill work over all links. Links take turns; within a link the oldest sequence comes first."""

    def __init__(
        self,
        *,
        engine: ModelEngine,
        residents: Residents,
        counters: DraftCounters,
        chunk_tokens: int,
        max_catch_up_tokens: int,
    ) -> None:
        self._engine = engine
        self._residents = residents
        self._counters = counters
        self._chunk_tokens = chunk_tokens
        self._max_catch_up_tokens = max_catch_up_tokens

    def needs(self, sequence: DraftSequence) -> bool:
        """True for a sequence that cannot be drafted for before some prefill."""
        if sequence.stage is Stage.FILLING:
            return sequence.can_fill
        waits = sequence.owes_block or sequence.wants_table
        return waits and sequence.num_unwritten > self._max_catch_up_tokens

    @property
    def has_work(self) -> bool:
        """True when a sequence needs prefill."""
        return any(self.needs(one) for link in self._residents.links.values() for one in link.sequences.values())

    def run_chunk(self, step: int) -> None:
        """Do one chunk for the link that waited longest."""
        for link in sorted(self._residents.links.values(), key=lambda one: one.last_prefill):
            for sequence in link.sequences.values():
                if self.needs(sequence):
                    link.last_prefill = step
                    self._advance(link, sequence)
                    return

    def _advance(self, link: Link, sequence: DraftSequence) -> None:
        length = len(sequence.text)
        if not self._residents.prepare(sequence, length, keep=length):
            self._residents.evict(link, sequence, RefusalReason.NO_SPACE)
            return
        start = len(sequence.written)
        # What only catches up leaves the last token to its round, which runs it for its logits in any case.
        last = length if sequence.stage is Stage.FILLING else length - 1
        chunk = sequence.text[start : min(start + self._chunk_tokens, sequence.runnable_len, last)]
        if chunk:
            table = self._residents.kv.block_table(sequence.kv_key)
            one = ForwardSlice(token_ids=chunk, start=start, block_table=table, num_logits=0)
            self._engine.forward(ForwardBatch(slices=(one,)))
            sequence.written.extend(chunk)
            self._counters.prefill_tokens += len(chunk)
            # At once, so that other sequences with the same beginning find it.
            self._residents.publish(sequence)
        if sequence.stage is Stage.FILLING and sequence.num_unwritten == 0:
            sequence.stage = Stage.READY
            sequence.acknowledged = True
            link.send(OpenAck(handle=sequence.handle, have_len=length))
