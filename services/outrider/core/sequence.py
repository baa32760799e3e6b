"""The committed text of one sequence, and the one function that changes it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from outrider.core.request import SequenceRequest
from outrider.core.speculation import SpeculationStats
from outrider.core.verdict import TokenLogprobs, Verdict

__all__ = ["Commit", "Finish", "FinishReason", "Sequence", "StopStringScan"]

StopStringScan = Callable[[int], int | None]
"""Takes the next committed token, returns the index of the stop string that it completes."""


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a sequence ended; at most one of the two details is set."""

    reason: FinishReason
    stop_string_index: int | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What one verdict added to a sequence."""

    base_len: int
    """Committed length before."""
    first_token_index: int
    """Output index of the first token."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    num_accepted: int
    """Accepted draft tokens among `token_ids`."""
    finish: Finish | None


class Sequence:
    """Prompt and committed output of one sequence. Committed text is immutable: it only grows."""

    def __init__(self, request: SequenceRequest, handle: int, stop_string_scan: StopStringScan | None = None) -> None:
        self.request = request
        self.handle = handle
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.resume_token_ids]
        self.prompt_len = len(request.prompt_token_ids)
        self.stats = SpeculationStats()
        self.finish: Finish | None = None
        self._scan = stop_string_scan
        self._stop_ids = frozenset(request.stop.eos_token_ids) | frozenset(request.stop.token_ids)
        if not self.token_ids:
            raise ValueError("a sequence starts with at least one token")

    @property
    def committed_len(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, resumed ones included."""
        return len(self.token_ids) - self.prompt_len

    @property
    def remaining_tokens(self) -> int:
        """Output tokens that may still be committed."""
        return self.request.stop.max_tokens - self.num_output_tokens

    def commit(self, verdict: Verdict) -> Commit:
        """Append the tokens of a verdict in order, up to and including the first that ends the text.

        Changes the text, the counters and `finish`; nothing behind the end is kept. A stop id or
        string comes before the length limit when one token meets both.
        """
        if self.finish is not None:
            raise ValueError(f"sequence {self.handle} has already finished")
        base_len, first_index = self.committed_len, self.num_output_tokens
        for token_id in verdict.token_ids:
            self.token_ids.append(token_id)
            self.finish = self._finish_at(token_id)
            if self.finish is not None:
                break
        count = self.committed_len - base_len
        accepted = min(count, verdict.num_accepted)
        self.stats.count_round(verified=verdict.num_draft_tokens, accepted=accepted, committed=count)
        return Commit(
            base_len=base_len,
            first_token_index=first_index,
            token_ids=verdict.token_ids[:count],
            logprobs=verdict.logprobs[:count],
            num_accepted=accepted,
            finish=self.finish,
        )

    def abort(self) -> None:
        """End the text where it stands, because nobody wants the rest."""
        if self.finish is None:
            self.finish = Finish(reason=FinishReason.ABORTED)

    def _finish_at(self, token_id: int) -> Finish | None:
        stop = self.request.stop
        matched = self._scan(token_id) if self._scan is not None else None
        if self.num_output_tokens >= stop.min_tokens:
            if token_id in self._stop_ids:
                return Finish(reason=FinishReason.STOP, stop_token_id=token_id)
            if matched is not None:
                return Finish(reason=FinishReason.STOP, stop_string_index=matched)
        if self.num_output_tokens >= stop.max_tokens:
            return Finish(reason=FinishReason.LENGTH)
        return None
