"""The laws q of blocks in flight that came in an outcome table without them (rejection rule).

A table holds ids only: of its blocks one at most is launched, and the ratio p / q is not needed before
that step's verify ends. So the draft sends the laws of the launched block when it reads Launch, and they
travel while the target computes.

**Laws that are missing cost acceptance, never exactness.** A block without its laws is judged like one
that was looked up in the text: as if each token x had been certain to be proposed. x is accepted with
probability p(x), and otherwise the token is drawn from p without x, so that every id v is committed with
probability p(v): for any x, however it was chosen. All that this takes is that the random numbers of the
judgement do not depend on x or on what became of its laws; they have purposes of their own (ACCEPT,
RESIDUAL, TARGET; the drafter's is DRAFT), and each is used once for a position, namely when that
position is decided: nothing was ever conditioned on it before. (One fresh draw from p in place of the
block would be as exact; it would throw away every accepted token.)

What is judged *with* its laws has to be distributed by q among the cases in which the laws came. So
whether they come in time must not depend on the drafted ids, and it does not: the draft sends them when
it reads Launch, before it computes anything, for all sequences of the step in one message; and how long
the target waits follows from times and from the number of blocks that lack laws. Nothing of the ids
enters but through the length of that message, which is the time that a few hundred bytes take. Laws that
cannot be those of their tokens are no laws: a draft that sends such is broken, and no rule that relies
on q could be exact with it.
"""

from collections.abc import Mapping, Sequence

from outrider.core.link import LaunchRow
from outrider.core.proposal import BlockLaws, Proposal, SparseLaw
from outrider.core.speculation import ProposalSource
from outrider.target.draft_checks import check_laws, needs_laws
from outrider.target.proposers import ProposerCounters
from outrider.target.running import RunningSequence
from outrider.target.scheduler import ScheduledRow, StepBatch

__all__ = ["LateLaws"]

_WAIT_SHARE = 0.1
"""Longest wait, as a share of the step, when every row of the step lacks its laws. A row judged without
them loses a third of its tokens or more; a wait costs every row the same share of its time."""


class LateLaws:
    """Which blocks of the step in flight lack their laws, and what has come of these. One step at a time."""

    def __init__(self, *, vocab_size: int, limit_s: float, counters: ProposerCounters) -> None:
        """`limit_s`: no wait is longer, whatever the step takes."""
        self._vocab_size = vocab_size
        self._limit_s = limit_s
        self._counters = counters
        self._missing: dict[int, tuple[RunningSequence, Proposal]] = {}
        self._arrived: dict[int, tuple[SparseLaw, ...]] = {}
        self._step_s = 0.0
        self._num_rows = 1
        self._until: float | None = None
        self._punctual = True
        """False from a step whose laws did not come in time until one whose laws do."""

    def start(self, batch: StepBatch, *, launched: Sequence[LaunchRow], step_s: float) -> None:
        """A step of about `step_s` seconds starts, of which the draft is told this much.

        It sends the laws that a block of its own lacks if it is told of that block; others stay without.
        """
        rows = batch.deciding
        told = {row.handle for row in launched if row.block_id}
        self._missing = {
            row.running.handle: (row.running, block) for row in rows if (block := _lacking(row)) is not None
        }
        self._arrived.clear()
        self._step_s, self._num_rows, self._until = step_s, max(1, len(rows)), None
        for handle in self._missing.keys() - told:
            self._give_up(handle)

    @property
    def pending(self) -> bool:
        """Whether laws are still missing."""
        return bool(self._missing)

    def left(self, now: float) -> float:
        """Seconds that the judgement may still wait for what is missing; nothing after laws that were late.

        The first call, when the verify has ended, begins the wait.
        """
        if self._until is None:
            share = _WAIT_SHARE * len(self._missing) / self._num_rows if self._punctual else 0.0
            self._until = now + min(self._limit_s, share * self._step_s)
        return self._until - now

    def take(self, event: BlockLaws) -> None:
        """Keep laws that a block in flight lacks. Others are late, repeated, or of nothing: counted and dropped."""
        missing = self._missing.get(event.handle)
        if missing is None or (missing[1].base_len, missing[1].block_id) != (event.base_len, event.block_id):
            self._counters.stale += 1
        elif check_laws(event.laws, missing[1].token_ids, vocab_size=self._vocab_size):
            self._arrived[event.handle] = event.laws
            del self._missing[event.handle]
        else:
            self._counters.invalid += 1
            self._give_up(event.handle)

    def finish(self) -> Mapping[int, tuple[SparseLaw, ...]]:
        """The verify has ended: the laws that came in time, by handle. What is missing now is late."""
        if self._missing:
            self._punctual = False
        elif self._arrived:
            self._punctual = True
        self.give_up()
        arrived, self._arrived = self._arrived, {}
        return arrived

    def give_up(self) -> None:
        """Nothing more will come for this step."""
        for handle in list(self._missing):
            self._give_up(handle)

    def _give_up(self, handle: int) -> None:
        running, _ = self._missing.pop(handle)
        running.sequence.stats.late_laws += 1
        self._counters.late_laws += 1


def _lacking(row: ScheduledRow) -> Proposal | None:
    """The block of a row, if it is the draft's and came without the laws that it has to be judged by."""
    block = row.proposal
    if block is None or block.laws or block.source is not ProposalSource.DRAFT:
        return None
    return block if needs_laws(row.running.sequence.request) else None
