"""Draft blocks for several branches in lockstep: one forward for all, as often as the longest needs.

A branch is a prefix and the number of tokens wanted behind it. Drafting on request has one branch
per sequence; drafting ahead for several outcomes has several of them. Neither shows here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.core.ports import Clock
from outrider.core.proposal import SparseLaw
from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.decoding.propose import Draws, ProposedToken, ProposeRow, draw
from outrider.draft.forked_text import ForkedText
from outrider.draft.timing import StepTimer
from outrider.engine.base import ForwardBatch, ForwardSlice, ModelEngine, wait_of
from outrider.engine.sequence_kv import KVCache

__all__ = ["Branch", "BranchDrafter"]


@dataclass(slots=True, kw_only=True)
class Branch:
    """One continuation in the making.

    `written` is exactly what stands in the KV slots of `kv_key`, and grows with every forward; its
    owner may cut it between forwards, and then no longer wants the branch.
    """

    kv_key: int
    written: list[int] | ForkedText
    pending: list[int]
    """The tokens that the next forward runs: at first the rest of the prefix, later the last draw."""
    num_draft_tokens: int
    """K, at least 1."""
    sampling: SamplingParams
    prompt_len: int
    noise_key: int
    rule: VerificationRule
    eos_token_ids: frozenset[int]
    num_ranked: int = 0
    """How many likely outcomes to keep per position."""
    wanted: bool = True
    """False once its owner has no use for it; it is then dropped between two forwards."""
    token_ids: list[int] = field(default_factory=list)
    """The block so far."""
    laws: list[SparseLaw] = field(default_factory=list)
    """q of each token where the rule needs it."""
    margins: list[float] = field(default_factory=list)
    """How sure the draft was of each token."""
    ranked: list[tuple[int, ...]] = field(default_factory=list)
    """The likeliest outcomes of each position, best first."""
    row: ProposeRow | None = None
    """How its tokens are drawn; made by whoever drafts it, once."""

    @property
    def complete(self) -> bool:
        """True at K tokens, or behind a token that ends the text."""
        return len(self.token_ids) >= self.num_draft_tokens or self.ended

    @property
    def ended(self) -> bool:
        """True behind a token that ends the text."""
        return bool(self.token_ids) and self.token_ids[-1] in self.eos_token_ids

    def continue_as(self, kv_key: int, written: list[int]) -> None:
        """Go on under another key, and on a list of tokens that equals what is written."""
        self.kv_key, self.written = kv_key, written
        self.row = None  # it reads the old list

    def push(self, token_id: int) -> None:
        """Add the next token of the block; it is what the next forward runs."""
        self.token_ids.append(token_id)
        # In place: the next forward may have been prepared with this very list.
        self.pending[:] = (token_id,)

    def note(self, token: ProposedToken) -> None:
        """Add what is known of the first token that nothing is known of yet."""
        self.margins.append(token.margin)
        self.ranked.append(token.ranked_token_ids)
        if token.law is not None:
            self.laws.append(token.law)


class BranchDrafter:
    """Runs the forwards of a set of branches and draws their tokens."""

    def __init__(self, *, engine: ModelEngine, kv: KVCache, clock: Clock, timer: StepTimer, q_top_k: int) -> None:
        self._engine = engine
        self._wait = wait_of(engine)
        self._kv = kv
        self._clock = clock
        self._timer = timer
        self._q_top_k = q_top_k
        self._unsettled: tuple[list[Branch], Draws] | None = None

    def draft(
        self,
        branches: Sequence[Branch],
        *,
        num_valid_ids: int,
        keep_wanted: Callable[[list[Branch]], list[Branch]],
        while_running: Callable[[], None] | None = None,
    ) -> None:
        """Complete the branches. Between forwards `keep_wanted` picks those worth going on with.

        `while_running` is called while the device works; never, if the engine's forward keeps the thread.

        KV for the prefix and the first K - 1 tokens must be reserved. The last token of a block is
        not run: whether it is ever needed is the verdict's word. What is known of the last tokens
        beside their ids may still be missing on return: `settle` adds it.
        """
        active = [branch for branch in branches if not branch.complete]
        slices = {id(branch): self._slice(branch) for branch in active}
        while active:
            started, num_branches = self._clock.now(), len(active)
            batch = ForwardBatch(slices=tuple(slices[id(branch)] for branch in active))
            logits = self._engine.forward(batch)  # [branches, vocab]
            # While the device works: all that neither this forward nor its draws depend on. What the forward
            # writes is noted first: `while_running` may bring a verdict that cuts it.
            slices = self._follow_up(active)
            rows = [branch.row or self._row(branch) for branch in active]
            if while_running is not None and self._wait is not None:
                while_running()
            self.settle()
            one_each = batch.num_rows <= 2 * num_branches
            if self._wait is not None:
                self._wait()
            draws = draw(logits, rows, num_valid_ids)
            for branch, token_id in zip(active, draws.token_ids, strict=True):
                branch.push(token_id)
            self._unsettled = (active, draws)
            if self._wait is None or draws.known:
                self.settle()
            active = [branch for branch in active if not branch.complete]
            active = keep_wanted(active) if active else active
            if one_each:
                self._timer.record(self._clock.now() - started, num_branches=num_branches)

    def settle(self) -> None:
        """Add what is known of the last step's tokens to their branches. Idempotent."""
        if self._unsettled is not None:
            (branches, draws), self._unsettled = self._unsettled, None
            for branch, token in zip(branches, draws.tokens(), strict=True):
                branch.note(token)

    def _follow_up(self, branches: Sequence[Branch]) -> dict[int, ForwardSlice]:
        """The forward under way has written what was pending: what would follow it, but for the tokens.

        Made while the device works; the draws then fill the tokens in.
        """
        for branch in branches:
            branch.written.extend(branch.pending)
        return {id(branch): self._slice(branch) for branch in branches}

    def _slice(self, branch: Branch) -> ForwardSlice:
        return ForwardSlice(
            token_ids=branch.pending,
            start=len(branch.written),
            block_table=self._kv.block_table(branch.kv_key),
            num_logits=1,
        )

    def _row(self, branch: Branch) -> ProposeRow:
        branch.row = ProposeRow(
            sampling=branch.sampling,
            prefix=branch.written,
            prompt_len=branch.prompt_len,
            noise_key=branch.noise_key,
            rule=branch.rule,
            q_top_k=self._q_top_k,
            num_ranked=branch.num_ranked,
        )
        return branch.row
