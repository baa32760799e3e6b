"""What a draft sends is looked at only if it can be: it is not trusted with ids, lengths or laws."""

from collections.abc import Sequence

from outrider.core.proposal import Proposal, SparseLaw
from outrider.core.request import SequenceRequest
from outrider.core.speculation import VerificationRule
from outrider.target.proposers import ProposerCounters

__all__ = ["BlockChecks", "check_laws", "check_proposal", "needs_laws"]

_LAW_SUM_TOLERANCE = 5e-4  # tighter than the verifier's own, which must never have to refuse


class BlockChecks:
    """Looks at blocks when they are about to be used, and counts those that may not be."""

    def __init__(self, *, vocab_size: int, counters: ProposerCounters) -> None:
        self._vocab_size = vocab_size
        self._counters = counters
        self.laws_follow = False
        """Whether a block of a table may come without its laws."""

    def may_judge(self, proposal: Proposal, request: SequenceRequest, *, of_table: bool) -> bool:
        """Whether a block may be judged; one that may not counts as invalid."""
        sound = check_proposal(
            proposal, request, vocab_size=self._vocab_size, laws_follow=of_table and self.laws_follow
        )
        self._counters.invalid += not sound
        return sound


def needs_laws(request: SequenceRequest) -> bool:
    """Whether blocks of this request are judged by the ratio p / q; greedy ones are judged by their ids."""
    return request.speculation.rule is VerificationRule.REJECTION and not request.sampling.greedy


def check_proposal(proposal: Proposal, request: SequenceRequest, *, vocab_size: int, laws_follow: bool = False) -> bool:
    """Whether a block may be judged. `laws_follow`: under the rejection rule it may come without its laws."""
    ids, laws = proposal.token_ids, proposal.laws
    if not proposal.base_len > 0 or not all(0 <= one < vocab_size for one in ids):
        return False
    if request.speculation.rule is not VerificationRule.REJECTION:
        return not laws
    return (laws_follow and not laws) or check_laws(laws, ids, vocab_size=vocab_size)


def check_laws(laws: Sequence[SparseLaw], token_ids: Sequence[int], *, vocab_size: int) -> bool:
    """Whether these can be the laws that the tokens were drawn from, one for each."""
    if len(laws) != len(token_ids):
        return False
    return all(_is_law_of(token_id, law, vocab_size) for token_id, law in zip(token_ids, laws, strict=True))


def _is_law_of(token_id: int, law: SparseLaw, vocab_size: int) -> bool:
    ids, probs = law.token_ids, law.probs
    if len(ids) != len(probs) or len(set(ids)) != len(ids) or not all(0 <= one < vocab_size for one in ids):
        return False
    if not all(0.0 <= one <= 1.0 for one in probs) or abs(sum(probs) - 1.0) > _LAW_SUM_TOLERANCE:
        return False
    return dict(zip(ids, probs, strict=True)).get(token_id, 0.0) > 0
