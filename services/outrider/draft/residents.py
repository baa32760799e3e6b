"""Who is held: links, their sequences, and the KV that these own. Finds room, and frees what is idle."""

from itertools import count

from outrider.core.link import Evicted, OpenNack, OpenSequence, RefusalReason, VerdictRow
from outrider.core.ports import Clock
from outrider.draft.acceptance import AcceptanceModel
from outrider.draft.branch import Branch
from outrider.draft.config import DraftConfig
from outrider.draft.counters import DraftCounters
from outrider.draft.feature_rows import FeatureRows
from outrider.draft.link import Link
from outrider.draft.outcomes import InFlight
from outrider.draft.sequence import DraftSequence, Stage
from outrider.engine.features import FeatureSink
from outrider.engine.sequence_kv import KVCache
from outrider.telemetry.spans import DraftSpans, NullDraftSpans

__all__ = ["Residents"]


class Residents:
    """All links and sequences of one draft. Handles are the targets' own, so KV has keys of its own."""

    def __init__(
        self,
        *,
        kv: KVCache,
        config: DraftConfig,
        clock: Clock,
        counters: DraftCounters,
        sink: FeatureSink | None = None,
        spans: DraftSpans | None = None,
    ) -> None:
        """`sink`: the engine, if it reads features."""
        self.spans = spans or NullDraftSpans()
        self.links: dict[int, Link] = {}
        self.kv = kv
        self.model = AcceptanceModel()
        self._config = config
        self._clock = clock
        self._counters = counters
        self._sink = sink
        self._kv_keys = count(1)

    @property
    def num_sequences(self) -> int:
        """Sequences over all links."""
        return sum(len(link.sequences) for link in self.links.values())

    @property
    def num_owed(self) -> int:
        """Sequences that wait for a block."""
        return sum(one.owes_block for link in self.links.values() for one in link.sequences.values())

    def new_kv_key(self) -> int:
        """A key that no sequence over any link has had."""
        return next(self._kv_keys)

    def admit(self, link: Link, opening: OpenSequence) -> bool:
        """Hold a new sequence, in the place of an idle one if need be; False when there is none.

        Its KV is allocated when its prefill begins.
        """
        if self.num_sequences >= self._config.max_num_seqs and not self._reclaim():
            return False
        key = self.new_kv_key()
        self.spans.opened(key, opening.traceparent, num_tokens=len(opening.token_ids))
        link.sequences[opening.handle] = DraftSequence(
            opening,
            kv_key=key,
            vocab_size=link.vocab_size,
            max_num_draft_tokens=link.max_num_draft_tokens,
            num_ranked=link.num_ranked,
            now=self._clock.now(),
            features=self._new_features(link),
        )
        return True

    def prepare(self, sequence: DraftSequence, length: int, *, keep: int) -> bool:
        """Make positions below `length` writable, behind at most `keep` tokens that stay written.

        Frees idle sequences where needed, then what was drafted ahead for others. False: there is no room, and
        nothing was allocated.
        Declares committed KV alone as computed, so that drafted tokens never enter the prefix cache.
        """
        key = sequence.kv_key
        if key not in self.kv:
            sequence.written[:] = sequence.text[: self.kv.open(key, sequence.text)]
        sequence.forget_written(keep)
        self.publish(sequence)
        while not self.kv.can_reserve(key, length):
            if not (self._reclaim(but=sequence) or self._give_up_branches(but=sequence)):
                return False
        self.kv.reserve(key, length)
        if sequence.features is not None and self._sink is not None:
            for first, rows in sequence.features.take(max(0, len(sequence.written) - 1), length):
                self._sink.write_features(self.kv.block_table(key), first, rows)
        return True

    def _new_features(self, link: Link) -> FeatureRows | None:
        if self._sink is None:
            return None
        return FeatureRows(self._sink.feature_row_bytes, max_rows=link.hello.max_model_len)

    def publish(self, sequence: DraftSequence) -> None:
        """Tell the KV bookkeeping how far the committed text is computed."""
        key, text = sequence.kv_key, sequence.text
        computed = min(len(sequence.written), len(text))
        if self.kv.computed_len(key) > computed:
            sequence.forget_written(self.kv.truncate(key, computed))
        else:
            self.kv.advance(key, text, computed)

    def refuse(self, link: Link, handle: int, reason: RefusalReason, detail: str = "") -> None:
        """Answer an opening with a refusal."""
        self._counters.refusals += 1
        link.send(OpenNack(handle=handle, reason=reason, detail=detail))

    def evict(self, link: Link, sequence: DraftSequence, reason: RefusalReason) -> None:
        """Free a sequence and tell its target: a refusal if it was never acknowledged."""
        self.remove(link, sequence)
        if sequence.acknowledged:
            self._counters.evictions += 1
            link.send(Evicted(handle=sequence.handle, reason=reason))
        else:
            self.refuse(link, sequence.handle, reason)

    def settle(self, link: Link, sequence: DraftSequence, row: VerdictRow) -> Branch | None:
        """The step in flight is over: learn from it, keep the branch of its outcome, free the others.

        Returns that branch, whose KV the sequence now owns; None when there was none.
        """
        in_flight = sequence.in_flight
        if in_flight is None or row.base_len != in_flight.base_len:
            return None
        self._learn(in_flight, row)
        winner = in_flight.branches.pop((row.num_accepted, row.next_token_id), None)
        self.ground(sequence)
        if winner is None:
            return None
        self.kv.adopt(sequence.kv_key, winner.branch.kv_key)
        sequence.written = winner.branch.written[:]
        winner.branch.continue_as(sequence.kv_key, sequence.written)
        if in_flight.sent_len:
            sequence.adopted_block_id = winner.block_id
        else:
            link.margin.learn(lost=True, late=True)  # the target has never heard of it
        winner.branch.wanted = False  # what is left of it is drafted only if the target asks
        self._counters.adopted += 1
        return winner.branch

    def ground(self, sequence: DraftSequence) -> None:
        """Nothing of the sequence is in flight any more: free all branches."""
        if sequence.in_flight is None:
            return
        self._free_branches(sequence.in_flight)
        sequence.in_flight = None

    def _give_up_branches(self, *, but: DraftSequence) -> bool:
        """Free what was drafted ahead for the step that has run longest, if there is any: its table has been sent,
        and what is lost are the forwards that its tokens would not need again. Never for `but`.
        """
        held = [
            one.in_flight
            for link in self.links.values()
            for one in link.sequences.values()
            if one is not but and one.in_flight is not None and one.in_flight.branches
        ]
        if not held:
            return False
        self._free_branches(min(held, key=lambda one: one.launched_at))
        return True

    def _free_branches(self, in_flight: InFlight) -> None:
        for made in in_flight.branches.values():
            made.branch.wanted = False
            self.kv.close(made.branch.kv_key)
        in_flight.branches.clear()

    def _learn(self, in_flight: InFlight, row: VerdictRow) -> None:
        """Every position up to the target's own token tells how good the guess there was."""
        drawn = (*in_flight.token_ids[: row.num_accepted], row.next_token_id)
        for guess, token_id in zip(in_flight.guesses, drawn, strict=False):
            self.model.learn(guess.margin, guess.rank_of(token_id))
        if in_flight.sampled:
            for m in range(min(row.num_accepted + 1, len(in_flight.token_ids))):
                self.model.learn_acceptance(accepted=m < row.num_accepted)

    def remove(self, link: Link, sequence: DraftSequence) -> None:
        """Free a sequence. Its committed KV may stay findable by its text until the blocks are needed."""
        self.ground(sequence)
        self.spans.closed(sequence.kv_key)
        del link.sequences[sequence.handle]
        if sequence.kv_key in self.kv:
            self.publish(sequence)
            self.kv.close(sequence.kv_key)

    def remove_link(self, link: Link) -> None:
        """Free everything of a link and forget it."""
        for sequence in list(link.sequences.values()):
            self.remove(link, sequence)
        self.links.pop(link.link_id, None)

    def evict_idle(self) -> None:
        """Free the sequences that heard nothing for the idle time-out."""
        before = self._clock.now() - self._config.idle_timeout_s
        for link in self.links.values():
            for sequence in [one for one in link.sequences.values() if one.last_heard <= before]:
                self.evict(link, sequence, RefusalReason.IDLE)

    def _reclaim(self, *, but: DraftSequence | None = None) -> bool:
        """Free the sequence that has been idle longest, if one is idle enough; never `but`, which needs the room."""
        before = self._clock.now() - self._config.reclaim_idle_s
        idle = [
            (link, one)
            for link in self.links.values()
            for one in link.sequences.values()
            if one is not but and one.last_heard <= before and one.stage is not Stage.FILLING and not one.owes_block
        ]
        if not idle:
            return False
        self.evict(*min(idle, key=lambda held: held[1].last_heard), RefusalReason.NO_SPACE)
        return True
