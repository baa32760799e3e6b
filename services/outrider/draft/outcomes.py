"""Which outcomes of a verify step to draft for: the most likely (accepted length, next token) pairs.

Outcome (j, t) has probability S_j * r_j(t): S_j is the chance that the first j tokens in flight are
accepted, r_j(t) that the target's token behind them is t. For j below the block's length t is never
the token in flight there, for that would be acceptance. (Kumar et al. 2026, arXiv 2603.03251.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.draft.acceptance import AcceptanceModel
from outrider.draft.branch import Branch

__all__ = ["Guess", "InFlight", "Outcome", "OutcomeBranch", "likely_outcomes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """What the draft expects at one position."""

    ranked: tuple[int, ...]
    """Likely tokens, best first."""
    margin: float
    """How sure it is of the first."""

    def rank_of(self, token_id: int) -> int | None:
        """The place of a token, 0 = first; None if it was not kept."""
        return self.ranked.index(token_id) if token_id in self.ranked else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One possible result of a verify step."""

    num_accepted: int
    next_token_id: int
    probability: float


@dataclass(slots=True, kw_only=True)
class OutcomeBranch:
    """A block in the making for one outcome."""

    outcome: Outcome
    branch: Branch
    block_id: int


@dataclass(slots=True, kw_only=True)
class InFlight:
    """What the target is verifying for one sequence, and what was drafted ahead for it."""

    base_len: int
    block_id: int
    """The draft's own block; 0 for another's, or none."""
    token_ids: tuple[int, ...]
    num_draft_tokens: int
    """Wanted length of the next blocks."""
    branch_budget: int
    """Most outcomes to draft for."""
    budget_s: float
    """Time until the verify ends, from the arrival of Launch."""
    launched_at: float
    version: int
    """Of the text that it stands behind; see `DraftSequence.version`."""
    guesses: list[Guess] = field(default_factory=list)
    """For positions 0 … len(token_ids): the token behind the first, second … accepted one."""
    branches: dict[tuple[int, int], OutcomeBranch] = field(default_factory=dict)
    """By (accepted length, next token)."""
    done: bool = False
    """True once the table is being drafted, or cannot be."""
    block_len: int = 0
    """Tokens of each block at which the table goes out; less than wanted where the time is short."""
    sampled: bool = False
    """True when the tokens were sampled from the draft's law and are judged by the ratio test."""
    sent_len: int = 0
    """Tokens of each block that have been queued; 0: the table has not."""


def likely_outcomes(
    in_flight: InFlight, model: AcceptanceModel, eos_token_ids: frozenset[int], limit: int
) -> Sequence[Outcome]:
    """The `limit` likeliest outcomes with a guess, best first. None that ends the text: nothing follows it."""
    found: list[tuple[float, int, int, int]] = []  # (minus probability, order, accepted length, next token)
    survival = 1.0
    for j, guess in enumerate(in_flight.guesses):
        drafted = in_flight.token_ids[j] if j < len(in_flight.token_ids) else None
        chances = model.probabilities(guess.margin, len(guess.ranked))
        own = next((chance for one, chance in zip(guess.ranked, chances, strict=True) if one == drafted), 0.01)
        accepted = model.acceptance if in_flight.sampled else own
        # What is rejected goes to the other tokens; without a drafted token they have everything.
        share = survival * (1.0 - accepted) / max(1.0 - own, 1e-6) if drafted is not None else survival
        for token_id, chance in zip(guess.ranked, chances, strict=True):
            if token_id != drafted and token_id not in eos_token_ids:
                found.append((-share * chance, len(found), j, token_id))
        if drafted is None or drafted in eos_token_ids:
            break
        survival *= accepted
    found.sort()
    return [Outcome(num_accepted=j, next_token_id=token, probability=-p) for p, _, j, token in found[:limit]]
