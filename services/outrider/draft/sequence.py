"""The draft's view of one sequence. Only the target's events change its text."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from outrider.core.link import LaunchRow, OpenSequence, OutcomeTable, Resync, VerdictRow
from outrider.core.policy import RoundPlan
from outrider.core.prefix_hash import PrefixHash
from outrider.core.proposal import Proposal, SparseLaw
from outrider.core.speculation import ProposalSource, SpeculationMode, VerificationRule
from outrider.draft.branch import Branch
from outrider.draft.feature_rows import FeatureRows
from outrider.draft.forked_text import ForkedText
from outrider.draft.outcomes import Guess, InFlight
from outrider.draft.sent_blocks import SentBlocks

__all__ = ["Divergence", "DraftSequence", "Stage"]


class Stage(Enum):
    """What a sequence is able to do."""

    FILLING = "filling"
    """Opened or repaired; its KV is being computed; OpenAck follows."""
    READY = "ready"
    """Can be drafted for."""
    OUT_OF_SYNC = "out_of_sync"
    """Waits for a Resync; everything else about it is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The text cannot be what the target has. `have_len` tokens of it are still common."""

    have_len: int
    drift: bool = False
    """True when the texts had the right lengths but not the right tokens."""


class DraftSequence:
    """Committed text, what stands in KV, the blocks under way, and the round that is owed.

    `written` is the ground truth of the KV: the tokens at positions 0, 1, … whose KV was computed,
    drafted ones included. It is a prefix of the text, or the text and a part of a drafted block.
    """

    def __init__(
        self,
        opening: OpenSequence,
        *,
        kv_key: int,
        vocab_size: int,
        max_num_draft_tokens: int,
        num_ranked: int,
        now: float,
        features: FeatureRows | None = None,
    ) -> None:
        self.opening = opening
        self.features = features
        """What the target said about its rows; None for a draft that reads text alone."""
        self.kv_key = kv_key
        self.last_heard = now
        """When the target last said something about it, in seconds of the injected clock."""
        self.acknowledged = False
        """True once the target was told that it is held."""
        self.text = list(opening.token_ids)
        self.written: list[int] = []
        self.stage = Stage.FILLING
        self.paused = False
        self.num_owed = 0
        """Draft tokens that the target waits for; 0 when no round is owed."""
        self.in_flight: InFlight | None = None
        """The verify step that runs now, as far as the target has told."""
        self.ahead_len = 0
        """Length of the blocks that the target last wanted a table of; 0 while it wants none."""
        self.chain: Branch | None = None
        """The block drafted behind the text, or as much of it as there is."""
        self.adopted_block_id = 0
        """The block that was drafted ahead for what then happened; 0 once its launch has been told, or without one."""
        self.version = 0
        """Changes with the text: what was drafted for another version is of no use."""
        self._vocab_size = vocab_size
        self._max_num_draft_tokens = max_num_draft_tokens
        self._num_ranked = num_ranked
        self._eos_token_ids = frozenset(opening.eos_token_ids)
        self._hash = PrefixHash(self.text)
        self._blocks = SentBlocks(len(self.text))
        self._planned_len = 0
        self._trusted_len = 0

    @property
    def handle(self) -> int:
        """The target's name for it."""
        return self.opening.handle

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end the text."""
        return self._eos_token_ids

    @property
    def wants_table(self) -> bool:
        """True when outcomes of the step in flight are to be drafted for."""
        in_flight = self.in_flight
        if in_flight is None or in_flight.done or self.stage is not Stage.READY or self.paused:
            return False
        return in_flight.branch_budget > 0 and in_flight.num_draft_tokens > 0

    @property
    def draft_from(self) -> int:
        """Positions that may stay written when a block is drafted behind the text."""
        # The last token is run again if it was already: its logits are the first draw's law.
        return len(self.written) if self.chain is not None else len(self.text) - 1

    @property
    def num_unwritten(self) -> int:
        """Tokens of the text that have no KV yet."""
        return max(0, len(self.text) - len(self.written))

    @property
    def runnable_len(self) -> int:
        """Tokens of the text that can be run: a row needs the features of the position before it."""
        return len(self.text) if self.features is None else min(len(self.text), self.features.known + 1)

    @property
    def can_fill(self) -> bool:
        """Whether some prefill can be done: more rows, or the end of it."""
        return len(self.written) < self.runnable_len or self.num_unwritten == 0

    @property
    def owes_block(self) -> bool:
        """True when a block is wanted now and can be drafted."""
        wanted = self.num_owed > 0 and self.stage is Stage.READY and not self.paused
        return wanted and self.runnable_len == len(self.text)

    def apply_verdict(self, row: VerdictRow) -> Divergence | None:
        """Commit what a round decided, roll back what it rejected, take the plan for the next round.

        A row whose result is already here changes nothing, except that its plan counts if none was
        taken for this text yet. Returns what has to be repaired, if anything; the sequence then
        waits for it.
        """
        if self.stage is Stage.OUT_OF_SYNC:
            return None
        if not 0 < row.base_len <= len(self.text):
            return self._diverge(len(self.text))
        new_len = row.base_len + row.num_accepted + 1
        if not self._holds(new_len, row.prefix_hash):
            token_ids = self._committed_by(row)
            if token_ids is None:
                return self._diverge(row.base_len)
            self._rewrite(row.base_len, token_ids)
            if not self._holds(new_len, row.prefix_hash):
                return self._diverge(0, drift=True)
        if len(self.text) == new_len:
            self._take(row.plan)
        return None

    def launch(self, row: LaunchRow, *, budget_s: float, now: float) -> InFlight | None:
        """What a verify step that has just started has in flight; None when it cannot be followed."""
        self.ahead_len = row.ahead.num_draft_tokens if row.ahead.branch_budget > 0 else 0
        if self.stage is not Stage.READY or row.base_len != len(self.text):
            return None
        token_ids: tuple[int, ...] | None = row.token_ids
        if row.block_id:
            block = self._blocks.find(row.block_id)
            known = block is not None and block.base_len == row.base_len and row.num_used <= len(block)
            token_ids = block.token_ids[: row.num_used] if known and block is not None else None
        if token_ids is None or not self._valid(token_ids):
            return None
        return InFlight(
            base_len=row.base_len,
            block_id=row.block_id,
            token_ids=token_ids,
            num_draft_tokens=min(row.ahead.num_draft_tokens, self._max_num_draft_tokens),
            branch_budget=row.ahead.branch_budget,
            sampled=self.opening.rule is VerificationRule.REJECTION and not self.opening.sampling.greedy,
            budget_s=budget_s,
            launched_at=now,
            version=self.version,
        )

    def take_adopted(self, row: LaunchRow) -> Proposal | None:
        """The block that was drafted ahead for this step, once; None when the step took one elsewhere, or had none."""
        block = self._blocks.find(self.adopted_block_id)
        self.adopted_block_id = 0
        return None if row.source is ProposalSource.NGRAM else block

    def known_guesses(self, token_ids: Sequence[int]) -> list[Guess]:
        """Guesses behind token_ids[:0], [:1], … that the drafted block has left, as far as it agrees.

        Forgets what is written behind the text and is not `token_ids`.
        """
        guesses: list[Guess] = []
        if (chain := self.chain) is not None:
            for m in range(min(len(chain.ranked), len(token_ids) + 1)):
                if list(token_ids[:m]) != chain.token_ids[:m] or not chain.ranked[m]:
                    break
                guesses.append(Guess(ranked=chain.ranked[m], margin=chain.margins[m]))
        agreed = len(self.text)
        for written, token_id in zip(self.written[agreed:], token_ids, strict=False):
            if written != token_id:
                break
            agreed += 1
        if agreed < len(self.text) + len(token_ids):
            self.forget_written(agreed)
        return guesses

    def apply_resync(self, resync: Resync) -> Divergence | None:
        """Replace the text from a position on. Text that is already here changes nothing."""
        first, token_ids = resync.first_position, resync.token_ids
        out_of_sync = self.stage is Stage.OUT_OF_SYNC
        common = self._trusted_len if out_of_sync else len(self.text)
        if not 0 <= first <= common:
            return self._diverge(common)
        if first + len(token_ids) < self.opening.prompt_len or not self._valid(token_ids):
            return self._diverge(first)
        if out_of_sync:
            self.stage = Stage.FILLING
        elif tuple(self.text[first : first + len(token_ids)]) == token_ids:
            return None
        self._rewrite(first, token_ids)
        return None

    def continues(self, branch: Branch, base_len: int) -> bool:
        """Whether a branch that was forked at `base_len` agrees with the text from there on."""
        # All but the last token of the text was written with it; where less is left, it was of another text.
        written = branch.written[base_len : len(self.text)]
        return base_len + len(written) >= len(self.text) - 1 and written == self.text[base_len:][: len(written)]

    def branch(self, num_draft_tokens: int) -> Branch:
        """The branch behind the whole text: the one that was begun already, or a new one."""
        if self.chain is None:
            self.chain = self.new_branch(
                kv_key=self.kv_key,
                written=self.written,
                pending=self.text[len(self.written) :],
                num_draft_tokens=num_draft_tokens,
            )
        self.chain.num_draft_tokens = num_draft_tokens
        self.chain.wanted = True
        return self.chain

    def new_branch(
        self, *, kv_key: int, written: list[int] | ForkedText, pending: list[int], num_draft_tokens: int
    ) -> Branch:
        """A continuation of `written` + `pending` under this sequence's law."""
        return Branch(
            kv_key=kv_key,
            written=written,
            pending=pending,
            num_draft_tokens=num_draft_tokens,
            num_ranked=self._num_ranked,
            sampling=self.opening.sampling,
            prompt_len=self.opening.prompt_len,
            noise_key=self.opening.noise_key,
            rule=self.opening.rule,
            eos_token_ids=self._eos_token_ids,
        )

    def forget_written(self, length: int) -> None:
        """Count nothing from position `length` on as written. A block that stood there is lost."""
        if length < len(self.written):
            del self.written[length:]
            self.chain = None

    def offer(self, block: Proposal) -> None:
        """Remember a block that goes to the target; the owed round is done."""
        self._blocks.add(block)
        self.num_owed = 0

    def remember_table(self, table: OutcomeTable, *, late_laws: Sequence[Sequence[SparseLaw]] = ()) -> None:
        """Keep blocks that the target may name, and by row of the table the laws that it was sent without."""
        self._blocks.add_table(table, late_laws)

    def take_laws(self, row: LaunchRow) -> tuple[SparseLaw, ...]:
        """Laws of the tokens in flight that the target lacks. Those of all other blocks are never needed."""
        return self._blocks.take_laws(row.block_id)[: row.num_used]

    def _committed_by(self, row: VerdictRow) -> tuple[int, ...] | None:
        """The tokens that a row adds behind its base; None when they are unknown or out of range."""
        accepted: tuple[int, ...] | None = row.accepted_token_ids
        if row.block_id:
            block = self._blocks.find(row.block_id)
            # A block that came late is judged by its tail: its base lies before that of the row.
            offset = row.base_len - block.base_len if block is not None else -1
            accepted = block.token_ids[offset:][: row.num_accepted] if block is not None and offset >= 0 else None
        if accepted is None or len(accepted) != row.num_accepted:
            return None
        token_ids = (*accepted, row.next_token_id)
        return token_ids if self._valid(token_ids) else None

    def _rewrite(self, first: int, token_ids: Sequence[int]) -> None:
        """Text from `first` on becomes `token_ids`; KV stays as far as it was computed for equal tokens.

        What was drafted behind equal tokens stays too.
        """
        matched = len(self.written)
        for at, (written, token_id) in enumerate(zip(self.written[first:], token_ids, strict=False), first):
            if written != token_id:
                matched = at
                break
        if self.features is not None:
            # Rows behind the text were run on outputs of their own; now there are features for them.
            matched = min(matched, len(self.text))
        del self.written[matched:]
        del self.text[first:]
        self.text.extend(token_ids)
        self._hash.truncate(first)
        self._hash.extend(token_ids)
        self._blocks.text_is(len(self.text))
        self.num_owed = 0
        self.chain = None
        self._planned_len = 0
        self.version += 1

    def _take(self, plan: RoundPlan) -> None:
        if self._planned_len == len(self.text):
            return
        self._planned_len = len(self.text)
        # Under a cached plan the target has its block already; what is wanted next comes with Launch.
        wanted = plan.num_draft_tokens if plan.mode is SpeculationMode.SEQUENTIAL else 0
        self.num_owed = max(0, min(wanted, self._max_num_draft_tokens))

    def _diverge(self, have_len: int, *, drift: bool = False) -> Divergence:
        self.stage = Stage.OUT_OF_SYNC
        self.num_owed = 0
        self.version += 1
        if self.features is not None:
            # Which rows they belong to is no longer sure: text and features come again from the start.
            self.features.forget()
            self.forget_written(0)
            have_len = 0
        self._trusted_len = have_len
        return Divergence(have_len=have_len, drift=drift)

    def _holds(self, length: int, prefix_hash: int) -> bool:
        return 0 < length <= len(self.text) and self._hash.at(length) == prefix_hash

    def _valid(self, token_ids: Sequence[int]) -> bool:
        return not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size)
