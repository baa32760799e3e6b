"""Applies a target's events to the state of its sequences. A bad event harms its own sequence only."""

from collections.abc import Sequence

from outrider.core.link import (
    Busy,
    CloseSequence,
    Features,
    Goodbye,
    Launch,
    LaunchRow,
    NeedResync,
    OpenAck,
    OpenSequence,
    PauseSequences,
    Ping,
    Pong,
    RefusalReason,
    ResumeSequences,
    Resync,
    TargetEvent,
    Verdicts,
)
from outrider.core.ports import Clock
from outrider.core.proposal import BlockLaws, Proposal
from outrider.draft.config import DraftConfig
from outrider.draft.counters import DraftCounters
from outrider.draft.link import Link
from outrider.draft.residents import Residents
from outrider.draft.sequence import Divergence, DraftSequence, Stage

__all__ = ["Intake"]

_KEY_RANGE = 1 << 64


class Intake:
    """From events to state. Computes nothing, so it may run between the forwards of a round."""

    def __init__(
        self,
        *,
        residents: Residents,
        config: DraftConfig,
        clock: Clock,
        counters: DraftCounters,
        max_model_len: int,
    ) -> None:
        self.draining = False
        """True: no new sequences."""
        self._residents = residents
        self._config = config
        self._clock = clock
        self._counters = counters
        self._max_model_len = max_model_len

    def apply(self, link: Link, events: Sequence[TargetEvent]) -> None:
        """Apply the events of one message in order; what they call for is queued on the link."""
        for event in events:
            match event:
                case OpenSequence():
                    self._open(link, event)
                case Features():
                    self._features(link, event)
                case Resync():
                    self._resync(link, event)
                case Verdicts():
                    self._verdicts(link, event)
                case CloseSequence():
                    self._close(link, event)
                case PauseSequences():
                    self._pause(link, event.handles, paused=True)
                case ResumeSequences():
                    self._pause(link, event.handles, paused=False)
                case Ping():
                    link.send(Pong(nonce=event.nonce))
                case Goodbye():
                    self._residents.remove_link(link)
                    return
                case Launch():
                    self._launch(link, event)

    def _open(self, link: Link, opening: OpenSequence) -> None:
        known = link.sequences.get(opening.handle)
        if known is not None and known.opening == opening and known.stage is not Stage.OUT_OF_SYNC:
            self._counters.dropped_events += 1
            if known.stage is Stage.READY:  # said again, should the target have lost the first answer
                link.send(OpenAck(handle=opening.handle, have_len=len(known.text)))
            return
        if known is not None:
            self._residents.remove(link, known)
        problem = _problem(opening, link.vocab_size)
        if problem:
            self._residents.refuse(link, opening.handle, RefusalReason.INVALID, problem)
        elif self.draining:
            self._residents.refuse(link, opening.handle, RefusalReason.DRAINING)
        elif len(opening.token_ids) > self._max_model_len:
            detail = f"{len(opening.token_ids)} tokens; the draft holds {self._max_model_len}"
            self._residents.refuse(link, opening.handle, RefusalReason.CONTEXT_TOO_LONG, detail)
        elif not self._residents.admit(link, opening):
            detail = f"max_num_seqs: {self._config.max_num_seqs} sequences are held"
            self._residents.refuse(link, opening.handle, RefusalReason.NO_SPACE, detail)

    def _resync(self, link: Link, resync: Resync) -> None:
        sequence = self._find(link, resync.handle)
        if sequence is not None:
            self._repair(link, sequence, sequence.apply_resync(resync))

    def _verdicts(self, link: Link, verdicts: Verdicts) -> None:
        for row in verdicts.rows:
            sequence = self._find(link, row.handle)
            if sequence is not None:
                winner = self._residents.settle(link, sequence, row)
                self._repair(link, sequence, sequence.apply_verdict(row))
                if winner is not None and sequence.continues(winner, row.base_len):
                    sequence.chain = winner
        now = self._clock.now()
        if now >= link.busy_until and self._residents.num_owed > self._config.max_queued_rows:
            link.busy_until = now + self._config.busy_retry_after_s
            link.send(Busy(retry_after_s=self._config.busy_retry_after_s))

    def _features(self, link: Link, event: Features) -> None:
        sequence = self._find(link, event.handle)
        if sequence is None:
            return
        rows = sequence.features
        if rows is None or not rows.add(event.first_position, event.num_rows, event.payload):
            self._counters.dropped_events += 1

    def _launch(self, link: Link, launch: Launch) -> None:
        now, budget_s = self._clock.now(), launch.budget_us / 1e6
        for row in launch.rows:
            sequence = self._find(link, row.handle)
            if sequence is not None:
                self._residents.ground(sequence)
                _learn_margin(link, row, sequence.take_adopted(row))
                sequence.in_flight = sequence.launch(row, budget_s=budget_s, now=now)
                self._push_laws(link, sequence, row)

    def _push_laws(self, link: Link, sequence: DraftSequence, row: LaunchRow) -> None:
        """Send what the table left out of the block in flight: at once, before anything is drafted."""
        laws = sequence.take_laws(row)
        if laws and sequence.in_flight is not None:
            self._counters.late_laws += 1
            link.send(BlockLaws(handle=row.handle, base_len=row.base_len, block_id=row.block_id, laws=laws))

    def _repair(self, link: Link, sequence: DraftSequence, divergence: Divergence | None) -> None:
        if sequence.in_flight is not None and sequence.in_flight.version != sequence.version:
            # Of another text, or of one that is in doubt; of equal length it would be no less wrong.
            self._residents.ground(sequence)
        if divergence is not None:
            self._counters.resyncs += 1
            self._counters.drift += divergence.drift
            link.drift_total += divergence.drift
            link.send(NeedResync(handle=sequence.handle, have_len=divergence.have_len))
        elif len(sequence.text) > self._max_model_len:
            self._residents.evict(link, sequence, RefusalReason.CONTEXT_TOO_LONG)

    def _close(self, link: Link, event: CloseSequence) -> None:
        sequence = self._find(link, event.handle)
        if sequence is not None:
            self._residents.remove(link, sequence)

    def _pause(self, link: Link, handles: Sequence[int], *, paused: bool) -> None:
        for handle in handles:
            sequence = self._find(link, handle)
            if sequence is not None:
                sequence.paused = paused

    def _find(self, link: Link, handle: int) -> DraftSequence | None:
        sequence = link.sequences.get(handle)
        if sequence is None:
            self._counters.dropped_events += 1
        else:
            sequence.last_heard = self._clock.now()
        return sequence


def _learn_margin(link: Link, row: LaunchRow, adopted: Proposal | None) -> None:
    """Learn whether the block of the last outcome was in time for the step that starts now."""
    if adopted is None:
        return
    lost = row.block_id != adopted.block_id
    if lost or row.num_arrived:
        link.margin.learn(lost=lost, late=row.num_arrived < len(adopted))
    elif row.num_used:  # a target that says only what it runs: less of a block may be for want of room
        link.margin.learn(lost=False, late=row.num_used < min(len(adopted), row.ahead.num_draft_tokens))


def _problem(opening: OpenSequence, vocab_size: int) -> str:
    """What is wrong with an opening; empty when nothing is."""
    if not opening.token_ids:
        return "token_ids: empty"
    if not 1 <= opening.prompt_len <= len(opening.token_ids):
        return f"prompt_len: {opening.prompt_len} is outside [1, {len(opening.token_ids)}]"
    if not 0 <= opening.noise_key < _KEY_RANGE:
        return f"noise_key: {opening.noise_key} is outside [0, 2^64)"
    if not (min(opening.token_ids) >= 0 and max(opening.token_ids) < vocab_size):
        return f"token_ids: an id is outside [0, {vocab_size})"
    return ""
