"""Whether to copy the next block out of the text or to take the draft's: by what either was worth so far.

The choice is made before any token of the round is looked at: from the length of the match, and from
how many tokens earlier rounds of this sequence accepted. So it cannot favour blocks by their ids, and
the rejection rule stays exact. What a copy would have been worth is known after every round, taken or
not, since it can be compared with the text that came: nothing has to be tried out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.proposal import Proposal
from outrider.core.speculation import ProposalSource
from outrider.target.ngram_proposer import NgramProposer
from outrider.target.running import Round, RunningSequence

__all__ = ["SourceChoice"]

_KEEP = 0.9
"""Share of the past that still counts after another round: about the last ten decide."""
_PRIOR_WEIGHT = 2.0
_DRAFT_PRIOR = 2.0
"""Accepted tokens a block that a draft is believed to be worth before it was seen."""
_COPY_PRIOR = 0.25
"""The same of a copy, for each token of the match."""
_LONGEST = 8
"""Longer matches count as this long."""


@dataclass(slots=True)
class _Mean:
    """A mean of accepted tokens that forgets, around a prior."""

    total: float
    weight: float = _PRIOR_WEIGHT

    @property
    def value(self) -> float:
        return self.total / self.weight

    def learn(self, accepted: int) -> None:
        self.total = self.total * _KEEP + accepted
        self.weight = self.weight * _KEEP + 1.0


@dataclass(slots=True)
class _Worth:
    draft: _Mean = field(default_factory=lambda: _Mean(_DRAFT_PRIOR * _PRIOR_WEIGHT))
    copies: dict[int, _Mean] = field(default_factory=dict)
    """By length of the match."""
    pending: Proposal | None = None
    """The copy for the present text, whether it was taken or not."""
    pending_match: int = 0

    def copy(self, match_len: int) -> _Mean:
        return self.copies.setdefault(match_len, _Mean(_COPY_PRIOR * match_len * _PRIOR_WEIGHT))


class SourceChoice:
    """Implements `proposers.BlockChoice` for a draft and n-grams together. Forgets a sequence at its end."""

    def __init__(self, ngram: NgramProposer) -> None:
        self._ngram = ngram
        self._worth: dict[int, _Worth] = {}

    def copies(self, wanted: Sequence[RunningSequence]) -> dict[int, Proposal]:
        """The blocks of those sequences for which a copy is worth more than what the draft gives."""
        found = self._ngram.collect(wanted)
        taken = {}
        for running in wanted:
            worth = self._worth.setdefault(running.handle, _Worth())
            worth.pending = found.get(running.handle)
            if worth.pending is None:
                continue
            worth.pending_match = min(self._ngram.match_len(running), _LONGEST)
            if worth.copy(worth.pending_match).value > worth.draft.value:
                taken[running.handle] = worth.pending
        return taken

    def learn(self, rounds: Sequence[Round]) -> None:
        """Compare what these rounds committed with what either source offered for them."""
        for one in rounds:
            worth = self._worth.get(one.running.handle)
            if worth is None:
                continue
            if one.proposal is not None and one.proposal.source is ProposalSource.DRAFT:
                worth.draft.learn(one.commit.num_accepted)
            copy, worth.pending = worth.pending, None
            if copy is not None and copy.base_len == one.commit.base_len:
                worth.copy(worth.pending_match).learn(_agreeing(copy.token_ids, one.commit.token_ids))
            if one.commit.finish is not None:
                self.forget(one.running)

    def forget(self, running: RunningSequence) -> None:
        """This sequence is gone."""
        self._worth.pop(running.handle, None)


def _agreeing(offered: Sequence[int], committed: Sequence[int]) -> int:
    """Leading tokens that agree. A copy longer than the round cannot show more than the round."""
    pairs = zip(offered, committed, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(offered), len(committed)))
