"""Prompt look-up on the target's side: what followed the last time these words stood here."""

from collections.abc import Iterable, Mapping, Sequence

from outrider.core.dispatch import DraftLinkStatus
from outrider.core.proposal import Proposal, SparseLaw
from outrider.core.speculation import ProposalSource, SpeculationReason
from outrider.decoding.ngram import NgramIndex
from outrider.target.proposers import DraftTimes
from outrider.target.running import Round, RunningSequence
from outrider.target.scheduler import StepBatch

__all__ = ["NgramProposer"]

_NO_BLOCK_ID = 0
"""Block ids name blocks on a draft link; these never travel as such."""


class NgramProposer:
    """Implements `Proposer` with one incremental index per sequence, made when first asked for."""

    def __init__(self, *, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n
        self._indexes: dict[int, tuple[NgramIndex, int]] = {}

    def problem(self) -> SpeculationReason | None:
        """It always can."""
        return None

    def availability(self, running: RunningSequence) -> SpeculationReason | None:
        """It always can."""
        return None

    @property
    def times(self) -> DraftTimes:
        """A look-up is free."""
        return DraftTimes()

    @property
    def drafts_ahead(self) -> bool:
        """There is nothing to do ahead: a look-up takes no time."""
        return False

    def has_block(self, running: RunningSequence) -> bool:
        """It makes its block when asked."""
        return False

    def launch(self, batch: StepBatch, expected_s: float) -> None:
        """Nothing to do."""

    def laws(self) -> Mapping[int, tuple[SparseLaw, ...]]:
        """None: nothing was drawn at random."""
        return {}

    def resolve(self, rounds: Sequence[Round]) -> None:
        """Nothing to do."""

    def prepare(self, admitted: Iterable[RunningSequence]) -> None:
        """Nothing to do."""

    def waits(self, wanted: Sequence[RunningSequence]) -> bool:
        """Never."""
        return False

    def collect(self, wanted: Sequence[RunningSequence]) -> dict[int, Proposal]:
        """Look up each sequence; those without a match are left out."""
        found = {}
        for running in wanted:
            token_ids = self._caught_up(running).propose(running.plan.num_draft_tokens)
            if token_ids:
                found[running.handle] = Proposal(
                    base_len=running.sequence.committed_len,
                    block_id=_NO_BLOCK_ID,
                    token_ids=tuple(token_ids),
                    source=ProposalSource.NGRAM,
                )
        return found

    def inform(self, rounds: Sequence[Round]) -> None:
        """Drop the indexes of finished sequences."""
        for one in rounds:
            if one.commit.finish is not None:
                self.forget(one.running)

    def explain(self, running: RunningSequence) -> SpeculationReason:
        """It is on; the text just does not repeat itself here."""
        return SpeculationReason.ON

    def forget(self, running: RunningSequence) -> None:
        """Drop its index."""
        self._indexes.pop(running.handle, None)

    def poll(self) -> None:
        """Nothing arrives."""

    def links(self) -> tuple[DraftLinkStatus, ...]:
        """None."""
        return ()

    def close(self) -> None:
        """Nothing to stop."""

    def match_len(self, running: RunningSequence) -> int:
        """Tokens of the longest suffix that stood in the text before; 0 without one."""
        return self._caught_up(running).match_len

    def _caught_up(self, running: RunningSequence) -> NgramIndex:
        index, known = self._indexes.get(running.handle) or (NgramIndex(min_n=self._min_n, max_n=self._max_n), 0)
        index.extend(running.sequence.token_ids[known:])
        self._indexes[running.handle] = (index, running.sequence.committed_len)
        return index
