"""A verdict: what the target decided about one row of a verify step."""

from dataclasses import dataclass

__all__ = ["TokenLogprobs", "Verdict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Raw log-softmax (before every sampling transform) at one position."""

    logprob: float
    """Of the committed token."""
    top: tuple[tuple[int, float], ...]
    """The most likely (token id, log-probability) pairs, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`token_ids` = the accepted draft tokens, then one more that the target drew itself.

    The last token is the recovered token (at the first rejection), the bonus token (everything
    accepted), or the plain next token (nothing was drafted).
    """

    num_draft_tokens: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token when the request asked for log-probabilities, else empty."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.token_ids) <= self.num_draft_tokens + 1:
            raise ValueError(f"{len(self.token_ids)} tokens from {self.num_draft_tokens} drafted ones")

    @property
    def num_accepted(self) -> int:
        """Accepted length; excludes the extra token."""
        return len(self.token_ids) - 1

    @property
    def next_token_id(self) -> int:
        """The recovered or bonus token."""
        return self.token_ids[-1]
