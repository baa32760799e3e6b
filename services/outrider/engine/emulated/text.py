"""A synthetic text whose acceptance and hit rates are known beforehand.

The target's token at a position is a hash of the sequence's seed and the position. The draft's ranked
guesses there are a function of the same two numbers alone, so every mode meets the same text and the
same mistakes: what a mode accepts and hits follows from these settings and from nothing else.

The draft's first guess is the target's token with chance a; otherwise the token is its (i + 2)-th guess
with chance `rank_shares[i]`, or none of its guesses. Measured on real logits at temperature 1 (design,
section 5): the ranks behind the first hold .44 .19 .11 .06 .05 .03 of the rest under the coupled rule,
and 0.53 together in the first three under rejection.

The guesses do not depend on the tokens before the position. It cannot matter: behind a wrong token
nothing of a block is looked at, and a block drafted for an outcome counts only if the outcome came true.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import log

from outrider.core.errors import ConfigError

__all__ = [
    "COUPLED_RANK_SHARES",
    "HEADER_LEN",
    "REJECTION_RANK_SHARES",
    "Guesses",
    "SyntheticText",
    "TextSettings",
    "header_tokens",
]

COUPLED_RANK_SHARES = (0.44, 0.19, 0.11, 0.06, 0.05, 0.03, 0.02, 0.015, 0.01)
"""Under shared noise, and under greedy decoding; the tail behind the sixth is extrapolated."""
REJECTION_RANK_SHARES = (0.31, 0.14, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015, 0.01)
"""Under the rejection rule, 0.53 in the first three; how these share it is an assumption."""
HEADER_LEN = 4
"""Tokens at the front of a text that name it: texts with another header are other texts."""

_MASK = (1 << 64) - 1
_MAX_CONFIDENCE = 0.999
_RECENT_POSITIONS = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """The text process of a target and its draft; give both the same."""

    noise_key: int = 1
    """Another key is another text for every header."""
    acceptance: float = 0.85
    """Chance that the draft's first guess is the target's token."""
    acceptance_changes: tuple[tuple[int, float], ...] = ()
    """(position, acceptance) pairs in order: from that position on the acceptance is another."""
    rank_shares: tuple[float, ...] = COUPLED_RANK_SHARES
    """Where the target's token stands among the draft's further guesses, as shares of the rest."""
    confidence_spread: float = 0.5
    """How much the draft knows about its mistakes. At half of the positions the chance of the first
    guess is higher than `acceptance`, at half it is lower, by this share of what the range [0, 1]
    allows; the margins of its logits say which. 0: all positions are alike."""

    def __post_init__(self) -> None:
        for position, acceptance in ((0, self.acceptance), *self.acceptance_changes):
            if not 0 <= acceptance <= 1:
                raise ConfigError(f"acceptance: {acceptance} from position {position} is outside [0, 1]")
        starts = [position for position, _ in self.acceptance_changes]
        if starts != sorted(set(starts)) or (starts and starts[0] < 1):
            raise ConfigError(f"acceptance_changes: positions {starts} must grow from 1 on")
        if not all(share >= 0 for share in self.rank_shares) or sum(self.rank_shares) > 1:
            raise ConfigError(f"rank_shares: {self.rank_shares} are not shares of 1")
        if not 0 <= self.confidence_spread <= 1:
            raise ConfigError(f"confidence_spread: {self.confidence_spread} is outside [0, 1]")

    def acceptance_at(self, position: int) -> float:
        """Chance that the first guess for this position is right."""
        index = bisect_right([start for start, _ in self.acceptance_changes], position)
        return self.acceptance_changes[index - 1][1] if index else self.acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesses:
    """What the draft thinks of one position."""

    token_ids: tuple[int, ...]
    """Best first."""
    margin: float
    """Log-odds of the first guess being right."""


class SyntheticText:
    """Tokens and guesses by header and position."""

    def __init__(self, settings: TextSettings, vocab_size: int) -> None:
        """Raises `ConfigError` when the vocabulary is too small for the guesses."""
        self._settings = settings
        self._vocab_size = vocab_size
        self._num_guesses = 1 + len(settings.rank_shares)
        self._bounds = tuple(accumulate(settings.rank_shares))
        # Branches of one text ask for the same positions again and again.
        self._recent = lru_cache(_RECENT_POSITIONS)(self._make_guesses)
        if vocab_size <= self._num_guesses:
            raise ConfigError(f"vocab_size: {vocab_size} does not hold {self._num_guesses} guesses and a token")

    def token(self, header: tuple[int, ...], position: int) -> int:
        """The target's token at `position`; `header` is the text below it, at most HEADER_LEN tokens."""
        return self._hash(header, position, 0) % self._vocab_size

    def guesses(self, header: tuple[int, ...], position: int) -> Guesses:
        """The draft's ranked guesses for `position`."""
        return self._recent(header, position)

    def _make_guesses(self, header: tuple[int, ...], position: int) -> Guesses:
        token, luck = self.token(header, position), self._hash(header, position, 1)
        confidence = self._confidence(position, luck & 1)
        # The lowest bit has chosen the confidence; the others stay uniform.
        place = self._place((luck >> 1) * 2.0**-63, confidence)
        # Distinct tokens, none of them the target's: a run of residues behind it, wrapped around it.
        first, others = self._hash(header, position, 2), self._vocab_size - 1
        ids = [(token + 1 + (first + i) % others) % self._vocab_size for i in range(self._num_guesses)]
        if place is not None:
            ids[place] = token
        clipped = min(max(confidence, 1 - _MAX_CONFIDENCE), _MAX_CONFIDENCE)
        return Guesses(token_ids=tuple(ids), margin=log(clipped / (1 - clipped)))

    def _confidence(self, position: int, high: int) -> float:
        acceptance = self._settings.acceptance_at(position)
        away = self._settings.confidence_spread * min(acceptance, 1 - acceptance)
        return acceptance + (away if high else -away)

    def _place(self, luck: float, confidence: float) -> int | None:
        """Index of the target's token among the guesses; None when it is not among them."""
        if luck < confidence:
            return 0
        place = 1 + bisect_right(self._bounds, (luck - confidence) / (1 - confidence))
        return place if place < self._num_guesses else None

    def _hash(self, header: tuple[int, ...], position: int, purpose: int) -> int:
        state = self._settings.noise_key * 0x9E3779B97F4A7C15
        for value in header:
            state = _mixed(state + value + 1)
        return _mixed(_mixed(state ^ (position * 4 + purpose)))


def header_tokens(seed: int, vocab_size: int) -> tuple[int, ...]:
    """The prompt that names text number `seed`: its digits in base `vocab_size`, lowest first."""
    return tuple(seed // vocab_size**i % vocab_size for i in range(HEADER_LEN))


def _mixed(value: int) -> int:
    """SplitMix64's output function (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
