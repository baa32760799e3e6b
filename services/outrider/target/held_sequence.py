"""What the target knows of one sequence on its draft: how far it has the text, and its last block."""

from enum import Enum

from outrider.core.link import LaunchRow, OpenSequence, RefusalReason, Resync, VerdictRow
from outrider.core.policy import RoundPlan
from outrider.core.prefix_hash import PrefixHash
from outrider.core.proposal import Proposal
from outrider.core.sequence import Commit, Sequence
from outrider.core.speculation import ProposalSource, SpeculationMode, SpeculationReason
from outrider.target.draft_checks import BlockChecks
from outrider.target.outcome_book import OutcomeBook
from outrider.target.running import Round
from outrider.target.scheduler import ScheduledRow

__all__ = ["HeldSequence", "Phase"]

_REOPEN_AFTER_ROUNDS = 64


class Phase(Enum):
    """Where a sequence stands on the draft."""

    OPENING = "opening"
    READY = "ready"
    REFUSED = "refused"
    LOST = "lost"


class HeldSequence:
    """Bookkeeping for one sequence on one link."""

    def __init__(self, sequence: Sequence, checks: BlockChecks) -> None:
        self.sequence = sequence
        self.phase = Phase.OPENING
        self.refusal: RefusalReason | None = None
        self.block: Proposal | None = None
        """The newest block that has arrived; may lie behind the text."""
        self.awaited_len: int | None = None
        """Committed length that the draft was asked to continue and to answer for."""
        self.book = OutcomeBook()
        """Blocks pushed ahead for the outcomes of the step in flight."""
        self.features_sent = 0
        """Rows whose features were sent: all positions below it."""
        self._checks = checks
        self._sent_len = 0
        """Length of the text at the draft once it has applied everything that was sent."""
        self._hash = PrefixHash()
        self._rounds_refused = 0

    def opening(self) -> OpenSequence:
        """The message that opens the sequence with all of its text."""
        request = self.sequence.request
        self._sent_len = self.sequence.committed_len
        return OpenSequence(
            handle=self.sequence.handle,
            token_ids=tuple(self.sequence.token_ids),
            prompt_len=self.sequence.prompt_len,
            sampling=request.sampling,
            noise_key=request.noise_key,
            rule=request.speculation.rule,
            eos_token_ids=request.stop.eos_token_ids,
            traceparent=request.traceparent,
        )

    def acknowledge(self, have_len: int) -> bool:
        """The draft holds the text up to `have_len`; False when that cannot be."""
        if not 0 < have_len <= self._sent_len:
            return False
        if self.phase is Phase.OPENING:
            self._sent_len = have_len
            self.phase = Phase.READY
        return True

    def rewind(self, have_len: int) -> bool:
        """The draft lost the text from `have_len` on; False when that cannot be."""
        if not 0 <= have_len <= self.sequence.committed_len:
            return False
        self._sent_len = min(self._sent_len, have_len)
        self.features_sent = min(self.features_sent, have_len)
        self.awaited_len = None
        return True

    def refuse(self, reason: RefusalReason) -> None:
        """The draft does not hold the sequence (any more)."""
        self.phase = Phase.REFUSED
        self.refusal = reason
        self.block = self.awaited_len = None
        self._rounds_refused = 0

    def lose(self) -> None:
        """Messages about this sequence were lost: open it again when the draft is back."""
        self.phase = Phase.LOST
        self.block = self.awaited_len = None

    def may_reopen(self) -> bool:
        """Whether to open it again now. Counts the rounds since a refusal."""
        if self.phase is Phase.LOST:
            return True
        if self.phase is not Phase.REFUSED or self.refusal in (RefusalReason.CONTEXT_TOO_LONG, RefusalReason.INVALID):
            return False
        self._rounds_refused += 1
        return self._rounds_refused > _REOPEN_AFTER_ROUNDS

    def offer(self, proposal: Proposal) -> None:
        """Keep a block unless a newer one is already here."""
        if self.block is None or proposal.base_len >= self.block.base_len:
            self.block = proposal

    def owes_block(self) -> bool:
        """Whether the draft was asked to continue exactly this text and has not answered."""
        if self.phase is not Phase.READY or self.awaited_len != self.sequence.committed_len:
            return False
        return self.block is None or self.block.base_len < self.awaited_len

    def verdict(self, finished: Round) -> tuple[list[Resync], VerdictRow]:
        """Tell the draft about a round and ask for the next block.

        When the draft is one round behind, the verdict alone is enough. Otherwise the missing text
        goes first, as a Resync, and the verdict carries only the last token.
        """
        sequence, commit, judged = self.sequence, finished.commit, finished.proposal
        text = sequence.token_ids
        self._hash.extend(text[len(self._hash) :])
        resync: list[Resync] = []
        base_len, block_id, num_accepted = commit.base_len, 0, 0
        accepted_ids: tuple[int, ...] = ()
        if self._sent_len != commit.base_len:
            base_len = len(text) - 1
            if self._sent_len < base_len:
                missing = tuple(text[self._sent_len : base_len])
                resync = [Resync(handle=sequence.handle, first_position=self._sent_len, token_ids=missing)]
        else:
            num_accepted = len(commit.token_ids) - 1
            # The block may have been replaced by the next one already, but what was launched is known.
            if judged is not None and (self._is_whole(judged) or self.book.launched(judged.base_len, judged.block_id)):
                block_id = judged.block_id
            else:
                accepted_ids = commit.token_ids[:-1]
        self._sent_len = len(text)
        # Under a cached plan the next block is here already, or nobody waits for it.
        self.awaited_len = len(text) if finished.running.plan.mode is SpeculationMode.SEQUENTIAL else None
        row = VerdictRow(
            handle=sequence.handle,
            base_len=base_len,
            block_id=block_id,
            num_accepted=num_accepted,
            next_token_id=text[-1],
            accepted_token_ids=accepted_ids,
            prefix_hash=self._hash.value,
            plan=finished.running.plan,
        )
        return resync, row

    def launch(self, row: ScheduledRow, ahead: RoundPlan) -> LaunchRow | None:
        """What a starting step has in flight for this sequence; None when the draft cannot follow it."""
        if self.phase is not Phase.READY or self._sent_len != self.sequence.committed_len:
            return None
        block = row.proposal
        own = block is not None and self._is_whole(block)
        # A block that is here but does not run, as for want of room: named all the same, or it would seem late.
        named = block if own else self.block if block is None and self.has_block else None
        launched = LaunchRow(
            handle=self.sequence.handle,
            base_len=self.sequence.committed_len,
            block_id=named.block_id if named is not None else 0,
            num_used=len(block) if block is not None else 0,
            num_arrived=len(self.block) if named is not None and self.block is not None else 0,
            source=block.source if block is not None else None,
            token_ids=block.token_ids if block is not None and not own else (),
            ahead=ahead,
        )
        self.book.launch(launched)
        return launched

    def look_up(self, commit: Commit) -> None:
        """The step is over: take the block of its outcome, if it was drafted ahead."""
        self.book.settle(commit.base_len, len(commit.token_ids) - 1, commit.token_ids[-1])
        self.take_outcome()

    def count_lookup(self) -> bool | None:
        """Whether the last outcome's block is here, looked at once more; None if that was counted already."""
        if not self.book.lookup_pending:
            return None
        self.take_outcome()  # its last tokens may have come since
        self.book.lookup_pending = False
        hit = self.has_block and self.awaited_len is None
        self.sequence.stats.cached_lookups += 1
        self.sequence.stats.cached_hits += hit
        return hit

    def drop_stale(self) -> bool:
        """Forget a block that lies behind the text; False when the text may yet come to where it begins."""
        if self.block is None or self.block.base_len >= self.sequence.committed_len:
            return False
        self.sequence.stats.stale += 1
        self.block = None
        return True

    def take_outcome(self) -> None:
        """Take the block of the last outcome if it has arrived by now, and is longer than one that is here."""
        block, present = self.book.take(self._is_sound), self.block
        if block is not None and (present is None or present.base_len != block.base_len or len(block) > len(present)):
            self.offer(block)

    @property
    def has_block(self) -> bool:
        """Whether the block for the present text is here."""
        return self.block is not None and self.block.base_len == self.sequence.committed_len

    def _is_sound(self, block: Proposal) -> bool:
        return self._checks.may_judge(block, self.sequence.request, of_table=True)

    def _is_whole(self, judged: Proposal) -> bool:
        """Whether a judged block is the draft's own from its first token on, not the tail of a late one."""
        own = self.block
        return (
            judged.source is ProposalSource.DRAFT
            and own is not None
            and (own.block_id, own.base_len) == (judged.block_id, judged.base_len)
        )

    def explain(self) -> SpeculationReason:
        """Why no block has come for the present text."""
        if self.phase is Phase.REFUSED:
            if self.refusal is RefusalReason.CONTEXT_TOO_LONG:
                return SpeculationReason.CONTEXT_TOO_LONG
            return SpeculationReason.DRAFT_BUSY
        return SpeculationReason.DRAFT_NOT_READY
