"""Sampling parameters: everything that shapes the target's law at one position."""

import math
from dataclasses import dataclass

from outrider.core.errors import InvalidRequest

__all__ = ["MAX_LOGIT_BIAS_ENTRIES", "SamplingParams"]

MAX_LOGIT_BIAS_ENTRIES = 1024
_MAX_TOP_K = 2**32 - 1  # what its fields in the contracts hold


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The transforms between raw logits and the law that a token is drawn from.

    Applied in one fixed order by `outrider.decoding.laws.target_law`: logit bias, repetition
    penalty, frequency and presence penalty, end-of-text suppression below `min_tokens`,
    temperature, top-k, top-p, min-p. Raises `InvalidRequest` naming the field and the limit.
    """

    temperature: float = 1.0
    """0 is greedy; ties go to the lowest token id."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all. Ties at the cut go to the lower id."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches top_p."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    frequency_penalty: float = 0.0
    """Subtracted once per earlier occurrence in the output."""
    presence_penalty: float = 0.0
    """Subtracted once for tokens that occur in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs with distinct ids, added to the raw logits; +-100 forces or forbids."""
    min_tokens: int = 0
    """End-of-text and stop ids cannot be drawn before this many output tokens."""
    suppressed_token_ids: tuple[int, ...] = ()
    """The ids that `min_tokens` suppresses: end-of-text ids and the request's stop ids."""

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        if self.top_k < 0:
            raise InvalidRequest("top_k", f"{self.top_k} is below 0 (0 keeps every token)")
        if self.top_k > _MAX_TOP_K:
            raise InvalidRequest("top_k", f"{self.top_k} is above {_MAX_TOP_K}")
        if self.min_tokens < 0:
            raise InvalidRequest("min_tokens", f"{self.min_tokens} is below 0")
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise InvalidRequest("logit_bias", f"{len(self.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS_ENTRIES}")
        ids = [token_id for token_id, _ in self.logit_bias]
        if len(set(ids)) != len(ids):
            raise InvalidRequest("logit_bias", "a token id appears twice")
        for token_id, bias in self.logit_bias:
            if token_id < 0:
                raise InvalidRequest("logit_bias", f"token id {token_id} is below 0")
            _within(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True when the law depends on the counts of earlier tokens."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def truncates(self) -> bool:
        """True when some tokens are removed from the law (top-k, top-p or min-p)."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def _within(field: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    too_low = value <= low if low_open else value < low
    if not math.isfinite(value) or too_low or value > high:
        bracket = "(" if low_open else "["
        raise InvalidRequest(field, f"{value} is outside {bracket}{low:g}, {high:g}]")
